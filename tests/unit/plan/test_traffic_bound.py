"""The traffic bound: never above what a balanced placement moves, and zero where nothing must
move.
"""

from __future__ import annotations

import numpy as np
import pytest

from libra.config import HeadShape, PoolConfig
from libra.plan.plan_pool import plan_pool
from libra.plan.traffic_bound import traffic_bound


@pytest.mark.parametrize("placement", ["surplus", "paper"])
@pytest.mark.parametrize("cp_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_balanced_placement_moves_less(placement: str, cp_size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    cuts = [np.sort(generator.choice(np.arange(1, 4096), 12, replace=False)) for _ in range(3)]
    packs = [[0, 4096], *([0, *cut.tolist(), 4096] for cut in cuts)]
    config = PoolConfig(pool_size=4, block_size=64, head_shards=4, chunks=1, placement=placement)
    plan = plan_pool(packs, cp_size=cp_size, config=config, heads=HeadShape(16, 4, 64))
    assert plan.imbalance <= config.tolerance + 1e-9
    assert 0 < traffic_bound(plan) <= plan.traffic.sum()


def test_nothing_must_move_in_a_balanced_pool() -> None:
    config = PoolConfig(pool_size=2, chunks=1)
    plan = plan_pool([[0, 256], [0, 256]], cp_size=1, config=config, heads=HeadShape(4, 4, 8))
    assert traffic_bound(plan) == plan.traffic.sum() == 0
