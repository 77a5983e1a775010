"""What attention takes beside q, k, v and out: all workers at once as worker by worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import libra
from libra.config import HeadShape, PoolConfig
from libra.plan.memory import pool_memory, rank_memory
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.rank_plan import make_rank_plan
from libra.plan.traffic import pool_traffic
from tests.pools import SmallPool, small_pools

LENGTHS = Path(__file__).parents[2] / "data" / "lengths-code.npy"


def check(plan: PoolPlan) -> None:
    """A pool's memory is that of its rank_plans."""
    memory = pool_memory(plan)
    refetch, size = plan.config.backward == "refetch", plan.heads.bytes
    for worker in range(plan.workers):
        rank_plan = make_rank_plan(plan, worker)
        mine = rank_memory(rank_plan, plan.heads, refetch=refetch)
        assert memory.kept[worker] == size * (mine.outputs + (0 if refetch else mine.fetched))
        forward = mine.forward + (mine.fetched if refetch else 0)
        backward = size * mine.backward + max(4, size) * mine.exact
        assert memory.workspace[worker] == max(size * forward, backward)
        alone = mine.forward + mine.fetched + mine.outputs
        assert memory.workspace_without_gradients[worker] == size * alone


@pytest.mark.usefixtures("eager_relays")
@given(pool=small_pools(), backward=st.sampled_from(["retain", "refetch"]))
def test_a_pool_takes_what_its_routes_take(pool: SmallPool, backward: str) -> None:
    check(
        plan_pool(
            pool.packs,
            cp_size=pool.cp_size,
            config=pool.config.replace(backward=backward),
            heads=pool.heads,
            tokens=pool.tokens,
        )
    )


@pytest.mark.usefixtures("eager_relays")
@given(pool=small_pools())
def test_rows_land_in_the_buffer_itself_where_their_order_lets_them(pool: SmallPool) -> None:
    plan = pool.plan()
    for worker in range(plan.workers):
        for assembly in make_rank_plan(plan, worker).kv_buffers:
            if assembly.permutation is not None:
                assert sorted(assembly.permutation) == list(range(assembly.rows))
                assert (assembly.permutation != np.arange(assembly.rows)).any()


def test_without_context_parallelism_nothing_lands_apart() -> None:
    """Each need comes from one holder, in one piece."""
    config = PoolConfig(pool_size=4, ranks_per_node=8)
    packs = [[0, 4096], *[list(range(0, 4097, 64))] * 3]
    plan = plan_pool(packs, cp_size=1, config=config, heads=HeadShape(8, 4, 64))
    assert plan.bytes_kv
    for worker in range(plan.workers):
        buffers = make_rank_plan(plan, worker).kv_buffers
        assert all(buffer.permutation is None for buffer in buffers)


@pytest.mark.parametrize("backward", ["retain", "refetch"])
def test_real_lengths_keep_every_row_once(backward: str) -> None:
    lengths = np.load(LENGTHS)
    packs = libra.pack_sequential(lengths[lengths <= 32_768], 32_768)
    chosen = libra.place_packs(packs.workloads[:64], 4)[0]
    plan = plan_pool(
        [packs.cu_seqlens(int(pack)) for pack in chosen],
        cp_size=4,
        config=PoolConfig(pool_size=4, ranks_per_node=4, backward=backward),
        heads=HeadShape(32, 8, 128),
    )
    check(plan)
    needs, heads, head_groups = plan.kv_fetches, plan.heads, plan.head_groups
    rows = np.bincount(
        needs.worker, np.where(needs.resident, 0, needs.length), minlength=plan.workers
    )
    held = rows * head_groups.kv_heads * (heads.dim + heads.value_dim) * heads.bytes
    assert pool_traffic(plan).fetched_kv.tolist() == held.tolist()
