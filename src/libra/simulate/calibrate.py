"""The kernel table of `libra calibrate`: what to measure on a machine, and what to make of it.

At every grid point (q rows, keys per row, heads) a call of equal segments is timed, forward and
backward.  A call has as many segments as make `rows` query rows, so that it fills the device as a
worker's does, but no more operations than a grid point may cost.  Points whose keys would pass
`longest` take the fraction of the longest that was measured: long rectangles all run alike.
Fractions are of the rate of a large matrix product, measured first.

Measuring itself needs PyTorch and is the caller's: `libra.runtime.measure` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

import numpy as np

from libra.cost.fields import read_presets
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

    q_len: Sequence[int]
    """Query rows of a segment."""
    k_per_q: Sequence[int]
    """Keys of a segment over its query rows, the least first."""
    heads: Sequence[int]
    """Query heads."""
    rows: int
    """Query rows of a call, where they are not too many operations."""
    longest: int
    """Most keys of a segment."""
    flops: float
    """Operations of a call's forward, unless one segment has more."""
    matmul_size: int
    """Rows and columns of the matrices whose product is timed."""

    def points(self, dim: int, heads_per_kv: int) -> Iterator[tuple[tuple[int, int, int], Shape]]:
        """Index (q, ratio, heads) and shape of every point to measure."""
        axes = (enumerate(axis) for axis in (self.q_len, self.k_per_q, self.heads))
        for (i, q), (j, ratio), (k, heads) in product(*axes):
            keys = q * ratio
            if j and keys > self.longest:
                continue  # filled from its neighbour with fewer keys
            # As many segments as fill `rows`, but no more operations than a point may cost.
            one = float(segment_flops(q, keys, heads, dim, dim, direction="forward"))
            count = max(1, min(self.rows // q, int(self.flops // one)))
            yield (i, j, k), Shape(count, q, keys, heads, max(1, heads // heads_per_kv))


GRIDS: Final[Mapping[str, Grid]] = read_presets(Grid, "calibration")
"""The grid of each device, and the small one of a quick calibration, such as `cpu-quick`."""


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
    # Step 1: the fraction of the peak at every point that was measured.
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
    # Step 2: long rectangles take the fraction of the longest that was measured.
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
