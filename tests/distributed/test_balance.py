"""Real lengths on real ranks: what each rank computes is near the mean, and the numbers stay right.

The loads are those of the plan that the ranks executed, which planned for itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import libra
from tests.distributed.cases import Case
from tests.distributed.ranks import RankPool
from tests.distributed.test_attention import check

LENGTHS = Path(__file__).parents[1] / "data" / "lengths-code.npy"
TOKENS = 512
"""L; small, since the reference is dense."""
SAMPLES = 2000


def windows(global_batch: int, pool_size: int) -> list[list[list[int]]]:
    """Bounds of the packs of each pool of one window of real lengths, in emission order."""
    packs = libra.pack_best_fit(np.load(LENGTHS)[:SAMPLES], TOKENS, longer="drop")
    pools = libra.place_packs(packs.workloads[:global_batch], pool_size)
    return [[packs.cu_seqlens(int(pack)).tolist() for pack in pool] for pool in pools]


def home_imbalance(case: Case) -> float:
    """max/mean - 1 if every rank computed its own rows."""
    work = np.zeros(len(case.bounds) * case.cp)
    for replica, bounds in enumerate(case.bounds):
        position = np.arange(case.tokens)
        sample = np.searchsorted(bounds, position, side="right") - 1
        pairs = np.where(position < bounds[-1], position - np.array(bounds)[sample] + 1, 0)
        for rank in range(case.cp):
            rows = libra.local_positions(case.tokens, case.cp, rank, case.config.shard_layout)
            work[replica * case.cp + rank] = pairs[rows].sum()
    return float(work.max() / work.mean() - 1)


@pytest.mark.parametrize("cp", [1, 2])
def test_ranks_of_a_pool_compute_equally_much(ranks4: RankPool, cp: int) -> None:
    config = libra.PoolConfig(pool_size=4 // cp, chunks=2)
    before, after = [], []
    for bounds in windows(8, config.pool_size)[:2]:
        case = Case(bounds=bounds, tokens=TOKENS, cp=cp, dtype=torch.float32, config=config)
        load = np.array(check(ranks4, case))
        before.append(home_imbalance(case))
        after.append(load.max() / load.mean() - 1)
    assert max(before) > 0.2
    assert max(after) <= config.tolerance + 0.01


def test_smaller_tiles_bring_the_papers_placement_near_the_mean(ranks4: RankPool) -> None:
    bounds = windows(8, 4)[0]
    loads = {}
    for block_size in (TOKENS, 32):
        config = libra.PoolConfig(
            pool_size=4, block_size=block_size, head_shards=2, chunks=2, placement="paper"
        )
        case = Case(bounds=bounds, tokens=TOKENS, dtype=torch.float32, config=config)
        load = np.array(check(ranks4, case))
        loads[block_size] = load.max() / load.mean() - 1
    assert loads[32] <= config.tolerance + 0.01
    assert loads[32] < loads[TOKENS]
