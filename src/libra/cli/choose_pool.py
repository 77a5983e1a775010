"""From a corpus to one pool of it: pack, take a window, group its packs, take a pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import check_count
from libra.data.packing import Packs, pack_sequential
from libra.data.vrsp import imbalance, place_packs, pool_loads

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenPool:
    """One pool, and where it comes from."""

    samples: int
    """Samples of the corpus, those left out included."""
    packs: Packs
    """All packs of the corpus."""
    global_batch: int
    """Packs of a window."""
    window: int
    pool: int
    """Index of the pool in its window, in the order of VRSP."""
    pools: IntArray
    """Packs of every pool of the window, counted through the corpus, [pools, P]."""
    pools_imbalance: float
    """max/mean - 1 over the pools of the window."""

    @property
    def members(self) -> IntArray:
        """Packs of the pool, in the order of its replicas, [P]."""
        return np.asarray(self.pools[self.pool])

    @property
    def cu_seqlens(self) -> list[NDArray[np.int32]]:
        """Sample bounds of each pack of the pool."""
        return [self.packs.cu_seqlens(int(pack)) for pack in self.members]

    @property
    def pool_samples(self) -> int:
        """Samples of the pool, pieces of cut ones counted each."""
        return sum(len(self.packs.lengths_of(int(pack))) for pack in self.members)


def choose_pool(
    lengths: IntArray,
    *,
    tokens: int,
    global_batch: int,
    pool_size: int,
    window: int = 0,
    pool: int = 0,
) -> ChosenPool:
    """Pack `lengths` in sequence to `tokens`, dropping longer samples, and place one window.

    Raises ValueError for a corpus that fills no window, and a window or pool that does not exist.
    """
    check_count("--global-batch", global_batch)
    check_count("--window", window, least=0)
    check_count("--pool", pool, least=0)
    packs = pack_sequential(lengths, tokens, longer="drop")
    windows = len(packs) // global_batch
    if window >= windows:
        raise ValueError(
            f"--window {window} does not exist: {len(packs)} packs of {tokens} tokens make "
            f"{windows} windows of --global-batch {global_batch}"
        )
    first = window * global_batch
    workloads = packs.workloads[first : first + global_batch]
    placed = place_packs(workloads, pool_size)
    if pool >= len(placed):
        raise ValueError(
            f"--pool {pool} does not exist: a window has {len(placed)} pools "
            f"(--global-batch {global_batch} / --config.pool-size {pool_size}), counted from 0"
        )
    return ChosenPool(
        samples=len(lengths),
        packs=packs,
        global_batch=global_batch,
        window=window,
        pool=pool,
        pools=placed + first,
        pools_imbalance=imbalance(pool_loads(workloads, placed)),
    )
