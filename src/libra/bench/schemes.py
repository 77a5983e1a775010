"""The schemes that can be measured, and which samples each runs at every step of a window.

ulysses    packs in sampler order, heads over each CP group
ring       packs in sampler order, keys and values round each CP group, zigzag shards
wlb        the window's samples packed again by cost, then Ulysses
cluster    one pool of all replicas, packs in sampler order, with overlap
tap        pools of P neighbours in sampler order; no overlap (chunks=1)
tap_vrsp   pools dealt by VRSP; no overlap (chunks=1)
libra      pools dealt by VRSP, refined and grouped; with overlap
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from libra.baselines.wlb import WlbConfig, repack_by_cost
from libra.config import PoolConfig, ulysses_beside
from libra.data.packing import Packs
from libra.data.pools import scheme_pools

IntArray = NDArray[np.int64]
Scheme = Literal["ulysses", "ring", "wlb", "cluster", "tap", "tap_vrsp", "libra"]

NAMES: Final[Mapping[Scheme, str]] = {
    "ulysses": "Ulysses",
    "ring": "ring, zigzag",
    "wlb": "WLB-LLM style",
    "cluster": "cluster-wide pool",
    "tap": "TAP, no overlap",
    "tap_vrsp": "TAP + VRSP, no overlap",
    "libra": "Libra",
}
"""Key and name of every scheme."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One microbatch of every replica, [DP]."""

    fragments: tuple[IntArray, ...]
    """Indices into the window's fragments, in the order of the pack."""
    tokens: tuple[int, ...]
    """Tokens of each pack, padding included."""

    def cu_seqlens(self, window: Packs, replica: int) -> IntArray:
        """Sample bounds of a replica's pack, int64."""
        return np.append(0, np.cumsum(window.lengths[self.fragments[replica]]))


def scheme_config(scheme: Scheme, config: PoolConfig, dp_size: int) -> PoolConfig:
    """The pool of a scheme; that of `ring` is one rank's CP group and only tells its shards.

    Pools larger than the job shrink to it.
    """
    if scheme in ("ulysses", "wlb"):
        return ulysses_beside(config)
    if scheme == "ring":
        return PoolConfig(pool_size=1, chunks=1, shard_layout="zigzag")
    if scheme == "cluster":
        return config.replace(pool_size=dp_size)
    pool = config.replace(pool_size=min(config.pool_size, dp_size))
    return pool if scheme == "libra" else pool.replace(chunks=1)


def window_steps(
    window: Packs, scheme: Scheme, *, dp_size: int, pool_size: int, wlb: WlbConfig
) -> list[Step]:
    """Every step of a window of GBS packs; `pool_size` is the scheme's.

    Raises ValueError for sizes that don't divide, and where WLB's packs cannot take the samples.
    """
    packs = len(window)
    if packs % dp_size:
        raise ValueError(
            f"global_batch={packs} packs over {dp_size} replicas: replicas must divide global_batch"
        )
    if scheme == "wlb":
        dealt = repack_by_cost(window.lengths, packs, window.tokens, wlb)
        return [
            Step(
                fragments=tuple(dealt[first : first + dp_size]),
                tokens=tuple(int(window.lengths[pack].sum()) for pack in dealt[first:][:dp_size]),
            )
            for first in range(0, packs, dp_size)
        ]
    pools = scheme_pools(scheme, window.workloads, pool_size, dp_size // pool_size)
    return [
        Step(
            fragments=tuple(
                np.arange(span.start, span.stop) for span in map(window.fragments_of, row)
            ),
            tokens=(window.tokens,) * dp_size,
        )
        for row in pools.reshape(-1, dp_size).tolist()
    ]
