"""Rows that each worker sends and receives, shown with rows that carry their identity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.plan_pool import plan_pool
from libra.plan.rank_plan import make_rank_plan
from tests.exchange_model import buffers, exchange, sample_of_position, segments
from tests.pools import SmallPool, small_pools

pytestmark = pytest.mark.usefixtures("eager_multicasts")

IntArray = NDArray[np.int64]


any_pool = small_pools(placements=("paper", "surplus", "ulysses"))


@settings(max_examples=40)
@given(any_pool)
def test_every_needed_key_row_arrives_once_and_nothing_else_does(pool: SmallPool) -> None:
    plan = pool.plan()
    moved, where = exchange(plan), np.stack(sample_of_position(plan))
    whole = plan.config.placement == "paper"  # complete groups, not prefixes
    for worker, rank_plan in enumerate(moved.rank_plans):
        needed: set[int] = set()
        for call in rank_plan.calls:
            _, k_buffer = buffers(moved, worker, call)
            for _, _, k_rows, k_heads in segments(call):
                k = k_buffer[k_rows, k_heads]
                if whole:
                    sample = where[0][k[0, 0] // plan.heads.kv]
                    at = np.flatnonzero(where[0] == sample)
                    k = at[:, None] * plan.heads.kv + k[0] % plan.heads.kv
                needed.update(k.ravel().tolist())
        needed -= set(moved.k_local[worker].ravel().tolist())
        arrived = [rows.ravel() for rows in moved.k_arrived[worker]]
        assert sorted(np.concatenate(arrived).tolist()) == sorted(needed)


@pytest.mark.usefixtures("eager_multicasts")
@given(pool=small_pools())
def test_a_permutation_is_only_where_rows_arrive_in_another_order(pool: SmallPool) -> None:
    plan = pool.plan()
    for worker in range(plan.workers):
        for kv_buffer in make_rank_plan(plan, worker).kv_buffers:
            if kv_buffer.permutation is not None:
                assert sorted(kv_buffer.permutation) == list(range(kv_buffer.rows))
                assert (kv_buffer.permutation != np.arange(kv_buffer.rows)).any()


def test_without_context_parallelism_no_row_is_permuted() -> None:
    """Each fetch comes from one holder, in one piece."""
    config = PoolConfig(pool_size=4, ranks_per_node=8)
    packs = [[0, 4096], *[list(range(0, 4097, 64))] * 3]
    plan = plan_pool(packs, cp_size=1, config=config, heads=HeadShape(8, 4, 64))
    assert plan.traffic[1].sum()
    for worker in range(plan.workers):
        buffers = make_rank_plan(plan, worker).kv_buffers
        assert all(buffer.permutation is None for buffer in buffers)
