"""How alike the pools of each window are, for several pool sizes: no plans, workloads alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.data.refinement import refine_pools
from libra.data.vrsp import check_pool_size, check_workloads, imbalance, place_packs, pool_loads

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolCurve:
    """Imbalance between the pools of each window, max / mean - 1 of their workloads."""

    pool_sizes: IntArray
    """P, [sizes]."""
    before: FloatArray
    """Packs grouped in sampler order, [windows, sizes]."""
    placed: FloatArray
    """Grouped by VRSP, as the paper does, [windows, sizes]."""
    refined: FloatArray
    """Grouped by VRSP and refined by swaps, as the sampler does, [windows, sizes]."""
    heaviest: FloatArray
    """Heaviest pack over the mean pack, [windows]: a pool smaller than that can't be balanced."""

    def __len__(self) -> int:
        return len(self.heaviest)


def pool_curve(windows: Iterable[NDArray[np.int64]], pool_sizes: Sequence[int]) -> PoolCurve:
    """Group every window into pools of each size; `windows` gives workloads, int64 [GBS] each.

    Raises ValueError for no window, bad workloads and pool sizes that don't divide GBS.
    """
    rows, heaviest = [], []
    for weights in windows:
        checked = check_workloads(weights)
        mean = float(checked.mean())
        heaviest.append(float(checked.max()) / mean if mean else 1.0)
        rows.append([_imbalances(checked, size) for size in pool_sizes])
    if not rows:
        raise ValueError("there is no window: the corpus is smaller than one global batch")
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(pool_sizes), 3)
    return PoolCurve(
        pool_sizes=np.array(pool_sizes, dtype=np.int64),
        before=table[:, :, 0],
        placed=table[:, :, 1],
        refined=table[:, :, 2],
        heaviest=np.array(heaviest),
    )


def _imbalances(weights: NDArray[np.int64] | FloatArray, size: int) -> tuple[float, float, float]:
    pools = check_pool_size(len(weights), size)
    before = imbalance(weights.reshape(pools, size).sum(axis=1))
    placed = place_packs(weights, size)
    refined = refine_pools(weights, placed)
    return before, imbalance(pool_loads(weights, placed)), imbalance(pool_loads(weights, refined))
