"""Bytes that attention holds besides q, k, v and out: all workers at once as worker by worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config import HeadShape, PoolConfig
from libra.plan.memory import CallMemory, pool_memory
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.rank_plan import RankPlan, make_rank_plan
from libra.plan.traffic import pool_traffic
from tests.pools import SmallPool, real_pool, small_pools

LENGTHS = Path(__file__).parents[2] / "data" / "lengths-code.npy"


def counted(rank_plan: RankPlan, heads: HeadShape, *, refetch: bool) -> CallMemory[int]:
    """Elements that a worker's calls allocate, buffer by buffer from its rank plan."""
    head_groups = rank_plan.head_groups
    q_row, o_row = head_groups.heads * heads.dim, head_groups.heads * heads.value_dim
    kv_row = head_groups.kv_heads * (heads.dim + heads.value_dim)
    widest = head_groups.kv_heads * max(heads.dim, heads.value_dim)
    permuted = [each for each in rank_plan.kv_buffers if each.permutation is not None]
    peer_q = sum(queries.received for queries in rank_plan.q)
    fetched_q = peer_q * q_row
    fetched_kv = sum(buffer.rows for buffer in rank_plan.kv_buffers) * kv_row
    packed_q = sum(queries.sent for queries in rank_plan.q)
    hops = (*rank_plan.kv, *rank_plan.kv_multicast)
    packed_kv = sum(hop.sent for hop in hops) * kv_row
    out_of_order = sum(buffer.rows for buffer in permuted) * kv_row
    return_q = packed_q * (q_row if q_row == o_row else q_row + o_row)
    forward = return_q + packed_kv + out_of_order
    backward = peer_q * (q_row + o_row) + packed_kv + sum(hop.received for hop in hops) * kv_row
    if refetch:
        backward += packed_q * (q_row + o_row)
        backward += fetched_q + fetched_kv + packed_kv + out_of_order
    else:
        backward += return_q
    accum, largest = fetched_kv, [max((len(each.own_index) for each in permuted), default=0), 0]
    if heads.bytes < 4:
        backward += out_of_order
        accum += rank_plan.rows * heads.kv * (heads.dim + heads.value_dim)
        for hop, exchanges in enumerate((rank_plan.kv, rank_plan.kv_multicast)):
            to_one = max(int(each.send_splits.max()) for each in exchanges)
            largest[hop] = max(largest[hop], to_one)
    scratch = largest[0] * widest, largest[1] * widest
    return CallMemory(
        fetched_q=fetched_q,
        fetched_kv=fetched_kv,
        peer_out=peer_q * o_row,
        forward=forward,
        backward=backward,
        accum_fp32=accum + sum(scratch),
        holder_scratch=scratch[0],
        multicast_scratch=scratch[1],
    )


def check(plan: PoolPlan) -> None:
    """A pool's memory is that of its rank plans."""
    memory = pool_memory(plan)
    refetch, size = plan.config.backward == "refetch", plan.heads.bytes
    for worker in range(plan.workers):
        rank_plan = make_rank_plan(plan, worker)
        mine = rank_plan.memory
        assert mine == counted(rank_plan, plan.heads, refetch=refetch)
        assert memory.kept[worker] == size * (mine.peer_out + (0 if refetch else mine.fetched))
        forward = mine.forward + (mine.fetched if refetch else 0)
        backward = size * mine.backward + max(4, size) * mine.accum_fp32
        assert memory.workspace[worker] == max(size * forward, backward)
        alone = mine.forward + mine.fetched + mine.peer_out
        assert memory.workspace_without_gradients[worker] == size * alone


@pytest.mark.usefixtures("eager_multicasts")
@given(pool=small_pools(), backward=st.sampled_from(["retain", "refetch"]))
def test_a_pool_takes_what_its_rank_plans_take(pool: SmallPool, backward: str) -> None:
    check(
        plan_pool(
            pool.packs,
            cp_size=pool.cp_size,
            config=pool.config.replace(backward=backward),
            heads=pool.heads,
            tokens=pool.tokens,
        )
    )


@pytest.mark.parametrize("backward", ["retain", "refetch"])
def test_real_lengths_keep_every_row_once(backward: str) -> None:
    plan = plan_pool(
        real_pool(32_768, 64, 4),
        cp_size=4,
        config=PoolConfig(pool_size=4, ranks_per_node=4, backward=backward),
        heads=HeadShape(32, 8, 128),
    )
    check(plan)
    fetches, heads, head_groups = plan.kv_fetches, plan.heads, plan.head_groups
    rows = np.bincount(
        fetches.worker, np.where(fetches.resident, 0, fetches.length), minlength=plan.workers
    )
    held = rows * heads.kv_bytes(head_groups.kv_heads)
    assert pool_traffic(plan).fetched_kv.tolist() == held.tolist()
