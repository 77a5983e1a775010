"""Attention seconds of a pool: every call of every worker, one by one, and both commands alike."""

from __future__ import annotations

import numpy as np
import pytest

from libra.config import HeadShape, PoolConfig
from libra.cost import CLUSTERS, AttentionTime, published_table
from libra.cost.attention_time import attend_seconds
from libra.plan.attention_calls import LOCAL, pool_segments
from libra.plan.plan_pool import plan_pool
from libra.plan.rank_plan import make_rank_plan

HEADS = HeadShape(q=8, kv=2, dim=16)
PACKS = [[0, 4096], [0, 100, 700, 4096], [0, 1, 2000, 4096], [0, 2048, 4096]]


@pytest.mark.parametrize("placement", ["surplus", "paper"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_seconds_are_those_of_all_calls_of_the_rank_plans(placement, direction) -> None:
    config = PoolConfig(pool_size=4, block_size=512, chunks=2, placement=placement)
    plan = plan_pool(PACKS, cp_size=2, config=config, heads=HEADS)
    table = published_table(CLUSTERS["h100"], key_dim=16, value_dim=16)
    workers, chunks = plan.workers, plan.head_groups.chunks
    local, waiting = np.zeros(workers), np.zeros((workers, chunks))
    for worker in range(workers):
        for launch in make_rank_plan(plan, worker).calls:
            segments = launch
            seconds = table.call_seconds
            for q_len, k_len in zip(segments.q_len, segments.k_len, strict=True):
                seconds += float(
                    table.seconds(int(q_len), int(k_len), segments.heads, direction=direction)
                )
            if launch.chunk == LOCAL:
                local[worker] += seconds
            else:
                waiting[worker, launch.chunk] += seconds
    found = attend_seconds(pool_segments(plan), table, (workers, chunks), direction)
    np.testing.assert_allclose(found, np.column_stack([local, waiting]))
    assert waiting.any() and local.any()
    lines = AttentionTime(cluster=CLUSTERS["h100"], table=table).timelines(plan)
    compute = getattr(lines, direction).compute
    np.testing.assert_allclose(compute, local + waiting.sum(axis=1))
