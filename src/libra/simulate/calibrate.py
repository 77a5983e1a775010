"""The kernel table of `libra calibrate`: what to measure on a machine, and what to make of it.

At every grid point (q rows, keys per row, heads) a call of equal segments is timed, forward and
backward.  A call has as many segments as make `rows` query rows, so that it fills the device as a
worker's does, but no more operations than a grid point may cost.  Points whose keys would pass
`longest` take the fraction of the longest that was measured: long rectangles all run alike.
Fractions are of the rate of a large matrix product, measured first.

Measuring itself needs PyTorch and is the caller's: `libra.runtime.measure` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import numpy as np

from libra.cost.kernel_table import DIRECTIONS, KernelTable, segment_flops

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A call of `count` equal segments, each with keys of its own."""

    count: int
    q_len: int
    k_len: int
    heads: int
    kv_heads: int


EMPTY: Final = Shape(count=1, q_len=1, k_len=1, heads=1, kv_heads=1)
"""A call that computes next to nothing: its seconds are those that every call costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which shapes are measured, and how large calls may get."""

    q_len: tuple[int, ...]
    k_per_q: tuple[int, ...]
    heads: tuple[int, ...]
    rows: int
    """Query rows of a call, where they are not too many operations."""
    longest: int
    """Most keys of a segment."""
    flops: float
    """Operations of a call's forward, unless one segment has more."""
    matmul_size: int

    def points(self, dim: int, heads_per_kv: int) -> Iterator[tuple[tuple[int, int, int], Shape]]:
        """Index (q, ratio, heads) and shape of every point to measure."""
        for i, q in enumerate(self.q_len):
            for j, ratio in enumerate(self.k_per_q):
                for k, heads in enumerate(self.heads):
                    keys = q * ratio
                    if j and keys > self.longest:
                        continue  # filled from its neighbour with fewer keys
                    one = float(segment_flops(q, keys, heads, dim, dim, direction="forward"))
                    count = max(1, min(self.rows // q, int(self.flops // one)))
                    kv_heads = max(1, heads // heads_per_kv)
                    yield (i, j, k), Shape(count, q, keys, heads, kv_heads)


GRIDS: Final[Mapping[tuple[Device, bool], Grid]] = MappingProxyType(
    {
        ("cpu", False): Grid(
            q_len=(1, 16, 64, 128, 512, 2048),
            k_per_q=(1, 2, 4, 16),
            heads=(1, 4),
            rows=2048,
            longest=4096,
            flops=2e9,
            matmul_size=2048,
        ),
        ("cpu", True): Grid(
            q_len=(1, 32, 512),
            k_per_q=(1, 4),
            heads=(1,),
            rows=4096,
            longest=2048,
            flops=5e8,
            matmul_size=1024,
        ),
        ("cuda", False): Grid(
            q_len=(1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384),
            k_per_q=(1, 2, 4, 8, 16, 64),
            heads=(1, 4, 16),
            rows=16_384,
            longest=131_072,
            flops=2e14,
            matmul_size=8192,
        ),
        ("cuda", True): Grid(
            q_len=(16, 128, 512, 2048, 8192),
            k_per_q=(1, 4, 16),
            heads=(8,),
            rows=16_384,
            longest=32_768,
            flops=2e13,
            matmul_size=8192,
        ),
    }
)
"""The grid of each device, and the small one of a quick calibration (True)."""


def fit_table(
    grid: Grid,
    seconds: Mapping[Shape, tuple[float, float]],
    *,
    peak: float,
    source: str,
    dim: int,
    heads_per_kv: int,
) -> KernelTable:
    """The table of a machine whose large matrix products run at `peak` FLOP/s.

    `seconds` are those of the empty call and of every point of the grid, forward and backward.
    Heads have `dim` elements, and up to `heads_per_kv` query heads share a key/value head.
    """
    call = seconds[EMPTY]
    fractions = np.full((2, len(grid.q_len), len(grid.k_per_q), len(grid.heads)), np.nan)
    for point, shape in grid.points(dim, heads_per_kv):
        for way, (direction, taken) in enumerate(zip(DIRECTIONS, seconds[shape], strict=True)):
            # The part that every call costs is kept apart, but never most of a measurement.
            spent = taken - min(call[way], taken / 2)
            flops = segment_flops(
                shape.q_len, shape.k_len, shape.heads, dim, dim, direction=direction
            )
            fractions[(way, *point)] = shape.count * float(flops) / spent / peak
    for j in range(1, len(grid.k_per_q)):
        shorter, longer = fractions[:, :, j - 1], fractions[:, :, j]
        fractions[:, :, j] = np.where(np.isnan(longer), shorter, longer)
    return KernelTable(
        source=source,
        peak_flops=peak,
        matmul_flops=peak,
        key_dim=dim,
        value_dim=dim,
        q_len=np.array(grid.q_len, dtype=np.int64),
        k_per_q=np.array(grid.k_per_q, dtype=np.float64),
        heads=np.array(grid.heads, dtype=np.int64),
        forward=fractions[0],
        backward=fractions[1],
        call_seconds=call[0],
    )
