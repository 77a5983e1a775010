"""The compiled part of the kernel table: interpolation in the logarithms of three axes."""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
IntArray = NDArray[np.int64]


@numba.njit(cache=True)
def interpolate(
    q_grid: Floats,
    ratio_grid: Floats,
    heads_grid: Floats,
    values: Floats,
    q: IntArray,
    k: IntArray,
    heads: IntArray,
) -> Floats:
    """exp of `values` [Q, K, H] between the logarithms of its grids, as at the edge beyond them.

    Points are (q, k / q, heads), int64 [points] each.
    """
    found = np.empty(len(q), dtype=np.float64)
    for n in range(len(q)):
        i, u = _place(q_grid, math.log(q[n]))
        j, v = _place(ratio_grid, math.log(k[n] / q[n]))
        m, w = _place(heads_grid, math.log(heads[n]))
        total = 0.0
        for a in range(2):
            for b in range(2):
                for c in range(2):
                    weight = (u if a else 1 - u) * (v if b else 1 - v) * (w if c else 1 - w)
                    if weight > 0:  # at 0 there may be no grid point
                        total += weight * values[i + a, j + b, m + c]
        found[n] = math.exp(total)
    return found


@numba.njit(cache=True)
def _place(grid: Floats, at: float) -> tuple[int, float]:
    """The grid point below, and how far it is to the next one, in [0, 1)."""
    if at <= grid[0]:
        return 0, 0.0
    last = len(grid) - 1
    if at >= grid[last]:
        return last, 0.0
    low = int(np.searchsorted(grid, at, side="right")) - 1
    return low, (at - grid[low]) / (grid[low + 1] - grid[low])
