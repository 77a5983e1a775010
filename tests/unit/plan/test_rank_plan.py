"""One worker's share of a plan: the same on every rank, whole even without work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.attention_calls import LOCAL
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.rank_plan import make_rank_plan
from tests.exchange_model import NOTHING, exchange, sample_of_position
from tests.pools import SmallPool, small_pools

pytestmark = pytest.mark.usefixtures("eager_multicasts")

IntArray = NDArray[np.int64]


any_pool = small_pools(placements=("paper", "surplus", "ulysses"))


@settings(max_examples=40)
@given(any_pool)
def test_chunks_are_alike_and_no_call_runs_before_its_buffers_or_after_their_return(
    pool: SmallPool,
) -> None:
    plan = pool.plan()
    rank_plans = [make_rank_plan(plan, worker) for worker in range(plan.workers)]
    assert len({rank_plan.kv_done for rank_plan in rank_plans}) == 1, (
        "gradients return in one order"
    )
    for rank_plan in rank_plans:
        assert [call.chunk for call in rank_plan.calls] == sorted(
            call.chunk for call in rank_plan.calls
        )
        for call in rank_plan.calls:
            assert call.q_buffer in (LOCAL, call.chunk)
            assert call.kv_buffer <= call.chunk
            if call.kv_buffer != LOCAL:
                assert call.chunk <= rank_plan.kv_done[call.kv_buffer] < plan.config.chunks
        assert len({(len(message.send_index), message.received) for message in rank_plan.q}) == 1
        assert rank_plan.lse_size == sum(call.lse_size for call in rank_plan.calls)


@settings(max_examples=25)
@given(any_pool)
def test_a_plan_that_came_over_the_wire_gives_the_same_rank_plan(pool: SmallPool) -> None:
    plan = pool.plan()
    copy = PoolPlan.from_buffer(plan.to_buffer(), plan.config, plan.heads)
    for worker in range(plan.workers):
        assert flat(make_rank_plan(copy, worker)) == flat(make_rank_plan(plan, worker))


def flat(value: object) -> object:
    """A rank_plan as nested lists, so that two can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [flat(item) for item in value]
    if hasattr(value, "__slots__"):
        return [flat(getattr(value, name)) for name in value.__slots__]
    return value


@settings(max_examples=25)
@given(any_pool)
def test_padding_rows_are_those_that_belong_to_no_sample(pool: SmallPool) -> None:
    plan = pool.plan()
    moved, (sample, _) = exchange(plan), sample_of_position(plan)
    for rank_plan, positions in zip(moved.rank_plans, moved.positions, strict=True):
        assert rank_plan.rows == len(positions)
        assert rank_plan.padding.tolist() == np.flatnonzero(sample[positions] == NOTHING).tolist()


def test_a_worker_without_work_has_no_call_but_every_exchange() -> None:
    config = PoolConfig(pool_size=2, block_size=4, chunks=2, placement="paper")
    heads = HeadShape(q=2, kv=2, dim=2)
    plan = plan_pool([[0, 1], [0, 1]], cp_size=2, config=config, heads=heads, tokens=1)
    assert plan.load.tolist() == [2, 0, 2, 0]
    for worker in (1, 3):
        rank_plan = make_rank_plan(plan, worker)
        assert (rank_plan.calls, rank_plan.rows) == ((), 0)
        assert [
            len(x)
            for x in (rank_plan.q, rank_plan.kv, rank_plan.kv_multicast, rank_plan.kv_buffers)
        ] == [2] * 4
