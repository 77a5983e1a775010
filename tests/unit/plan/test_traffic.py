"""Counts of a whole pool equal those of its rank plans, and the figures of the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.cli.choose_pool import choose_pool
from libra.config import BackwardMode, HeadShape, PoolConfig
from libra.cost.attention_time import moved_bytes
from libra.plan.attention_calls import PoolSegments, pool_segments
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.rank_plan import make_rank_plan
from libra.plan.traffic import pool_traffic
from tests.pools import SmallPool, small_pools
from tests.unit.plan.slow_traffic import Segment, all_rank_plans, slow_segments, slow_traffic

pytestmark = pytest.mark.usefixtures("eager_multicasts")

LENGTHS = Path(__file__).parents[2] / "data" / "lengths-code.npy"


EVERY = small_pools(placements=("surplus", "paper", "ulysses"))


MODES = st.sampled_from(["retain", "refetch"])


NAMES = ("worker", "chunk", "q_buffer", "kv_buffer", "q_len", "k_len", "heads", "kv_heads")


def segments(work: PoolSegments) -> Counter[Segment]:
    columns = [getattr(work, name).tolist() for name in NAMES]
    return Counter(zip(*columns, strict=True))


def check(plan: PoolPlan) -> None:
    """Everything that is counted at once is what the rank plans say."""
    rank_plans = all_rank_plans(plan)
    assert segments(pool_segments(plan)) == slow_segments(rank_plans)
    traffic, slow = pool_traffic(plan), slow_traffic(plan, rank_plans)
    for field in fields(slow):
        found, wanted = getattr(traffic, field.name), getattr(slow, field.name)
        assert found.dtype == np.int64
        assert found.shape == wanted.shape, field.name
        assert (found == wanted).all(), field.name


@given(EVERY, MODES)
@settings(max_examples=300)
def test_a_pool_counted_at_once_is_its_rank_plans_counted_one_by_one(
    pool: SmallPool, backward: BackwardMode
) -> None:
    plan = plan_pool(
        pool.packs,
        cp_size=pool.cp_size,
        config=pool.config.replace(backward=backward),
        heads=pool.heads,
        tokens=pool.tokens,
    )
    check(plan)


@given(st.data())
@settings(max_examples=200)
def test_and_so_is_one_whose_tiles_lie_anywhere(data: st.DataObject) -> None:
    """No placement gives such plans; the runtime would execute them all the same."""
    plan = data.draw(EVERY).plan()
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    anywhere = random.integers(0, plan.workers, len(plan.assignment), dtype=np.int32)
    if data.draw(st.booleans()):  # neighbours on one worker: segments to join
        anywhere = np.sort(anywhere)
    check(replace(plan, assignment=anywhere))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("placement", ["surplus", "paper", "ulysses"])
def test_real_lengths_count_alike(placement: Any, layout: Any) -> None:
    pool_size = 1 if placement == "ulysses" else 4
    chosen = choose_pool(
        np.load(LENGTHS)[:3000], tokens=32_768, global_batch=16, pool_size=pool_size
    )
    config = PoolConfig(
        pool_size=pool_size,
        block_size=2048,
        head_shards=1 if placement == "ulysses" else 2,
        chunks=2,
        placement=placement,
        shard_layout=layout,
        backward="refetch",
    )
    heads = HeadShape(q=32, kv=8, dim=64)
    check(plan_pool(chosen.cu_seqlens, cp_size=4, config=config, heads=heads))


@given(EVERY)
@settings(max_examples=50)
def test_chunks_add_up_to_the_loads_and_the_traffic_of_the_plan(pool: SmallPool) -> None:
    plan = pool.plan()
    traffic = pool_traffic(plan)
    assert (traffic.local_pairs + traffic.pairs.sum(axis=1) == plan.load).all()
    dispatched = (traffic.dispatched + traffic.passed_on).sum(axis=0)
    assert (dispatched == plan.traffic[0] + plan.traffic[1]).all()
    assert (traffic.returned.sum(axis=0) == plan.traffic[2]).all()
    assert (traffic.returned == traffic.returned[:1]).all()  # every chunk the same share of Q and O
    for moved in (*traffic.dispatched, *traffic.returned):
        assert not np.diagonal(moved).any()


@given(EVERY, MODES)
@settings(max_examples=50)
def test_backward_moves_gradients_the_way_back(pool: SmallPool, backward: BackwardMode) -> None:
    plan = plan_pool(
        pool.packs,
        cp_size=pool.cp_size,
        config=pool.config.replace(backward=backward),
        heads=pool.heads,
        tokens=pool.tokens,
    )
    traffic = pool_traffic(plan)
    dout, again_q, again_kv, dq, dkv = plan.backward_traffic
    dispatched, returned = moved_bytes(traffic, "backward")
    assert (dispatched.sum(axis=0) == dout + again_q + again_kv).all()
    assert (returned.sum(axis=0) == dq + dkv).all()
    q, kv, o = plan.traffic
    for back, forth in ((dout, o), (dq, q), (dkv, kv)):
        assert (back == forth.T).all()
    fetched_again = backward == "refetch"
    assert (again_q == q * fetched_again).all()
    assert (again_kv == kv * fetched_again).all()


@given(EVERY)
@settings(max_examples=25)
def test_extra_memory_is_that_of_the_rank_plans(pool: SmallPool) -> None:
    plan = pool.plan()
    traffic = pool_traffic(plan)
    for worker in range(plan.workers):
        memory = make_rank_plan(plan, worker).memory
        elements = memory.fetched + memory.peer_out
        assert traffic.extra_memory[worker] == elements * plan.heads.bytes
