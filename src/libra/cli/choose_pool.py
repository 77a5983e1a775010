"""From a corpus to one pool of it: pack the samples, take a window, group its packs, take a pool.

lengths ── pack_sequential ──> packs ── global_batch ──> window ── VRSP ──> pools ──> one pool
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.config import check_count
from libra.data.lengths import IntArray
from libra.data.packing import pack_sequential
from libra.data.pools import imbalance, place_packs, pool_loads


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOrigin:
    """Where a pool comes from."""

    file: str
    """Name of the corpus."""
    samples: int
    """Samples of the corpus, those left out included."""
    dropped_samples: int
    """Samples longer than a pack, which are left out."""
    packs: int
    """Packs of the whole corpus."""
    global_batch: int
    """Packs of a window."""
    window: int
    pool: int
    """Index of the pool in its window, in the order of VRSP."""
    pools: int
    """Pools of a window."""
    pools_imbalance: float
    """max/mean - 1 over the pools of the window."""
    pool_packs: list[int]
    """Packs of the pool, counted through the corpus, in the order of its replicas."""
    pool_samples: int
    """Samples of the pool; pieces of a sample that was cut count each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPool:
    """One pool of a corpus."""

    origin: PoolOrigin
    cu_seqlens: list[NDArray[np.int32]]
    """Sample bounds of each pack of the pool."""


def choose_pool(
    lengths: IntArray,
    *,
    tokens: int,
    global_batch: int,
    pool_size: int,
    window: int = 0,
    pool: int = 0,
    file: str = "",
) -> ChosenPool:
    """Pack `lengths` in sequence to `tokens`, drop longer samples, and take a pool of a window.

    Raises ValueError for a corpus that fills no window, and a window or pool that does not exist.
    """
    check_count("--global-batch", global_batch)
    check_count("--window", window, least=0)
    check_count("--pool", pool, least=0)
    # Samples in the corpus's order, as training reads them; packs after the last window are unused.
    packs = pack_sequential(lengths, tokens, longer="drop")
    windows = len(packs) // global_batch
    if window >= windows:
        raise ValueError(
            f"--window {window} does not exist: {len(packs)} packs of {tokens} tokens make "
            f"{windows} windows of --global-batch {global_batch}"
        )
    # VRSP counts the packs of a window from 0; `first` counts them through the corpus.
    first = window * global_batch
    workloads = packs.workloads[first : first + global_batch]
    pools = place_packs(workloads, pool_size)
    if pool >= len(pools):
        raise ValueError(
            f"--pool {pool} does not exist: a window has {len(pools)} pools "
            f"(--global-batch {global_batch} / --config.pool-size {pool_size}), counted from 0"
        )
    members: list[int] = (pools[pool] + first).tolist()
    return ChosenPool(
        origin=PoolOrigin(
            file=file,
            samples=len(lengths),
            dropped_samples=packs.dropped_samples,
            packs=len(packs),
            global_batch=global_batch,
            window=window,
            pool=pool,
            pools=len(pools),
            pools_imbalance=imbalance(pool_loads(workloads, pools)),
            pool_packs=members,
            pool_samples=sum(len(packs.lengths_of(pack)) for pack in members),
        ),
        cu_seqlens=[packs.cu_seqlens(pack) for pack in members],
    )
