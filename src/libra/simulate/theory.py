"""Why pools balance at all: the law of large numbers, as a formula and by drawing.

All figures are imbalances *between pools*: the heaviest pool's workload over the mean pool's, - 1.
Packs are grouped at random; what VRSP makes of the same packs is `libra.simulate.pools`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.data.lengths import check_count
from libra.data.vrsp import check_workloads

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def expected_imbalance(variation: ArrayLike, packs: ArrayLike, pool_size: ArrayLike) -> FloatArray:
    """E[R] - 1 of D = `packs` grouped at random into D / P pools: CV / sqrt(P) * sqrt(2 ln(D / P)).

    `variation` is the CV (standard deviation over mean) of pack workloads.  Arguments broadcast; 0
    where one pool holds all.  The formula takes pools as normal and many, so it lies above what a
    few pools show and says nothing of a single outlier.

    Raises ValueError for a negative or infinite CV, and for P that is not in [1, D].
    """
    cv = np.asarray(variation, dtype=np.float64)
    window = np.asarray(packs, dtype=np.float64)
    size = np.asarray(pool_size, dtype=np.float64)
    if not (np.isfinite(cv) & (cv >= 0)).all():
        raise ValueError(f"variation is {variation!r}; a CV must be finite and >= 0")
    if not ((size >= 1) & (size <= window)).all():
        raise ValueError(f"pool_size is {pool_size!r}; it must lie in [1, packs={packs!r}]")
    expected: FloatArray = cv / np.sqrt(size) * np.sqrt(2.0 * np.log(window / size))
    return expected


def variation(workloads: ArrayLike) -> float:
    """CV of pack workloads, standard deviation over mean; 0 where all are zero."""
    weights = np.asarray(check_workloads(workloads), dtype=np.float64)
    mean = float(weights.mean())
    return float(weights.std()) / mean if mean else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomGrouping:
    """Imbalance between pools of packs grouped at random, for each pool size."""

    pool_sizes: IntArray
    """P, [sizes]."""
    imbalance: FloatArray
    """Mean over the draws, [sizes]."""
    error: FloatArray
    """Standard error of that mean, [sizes]."""
    low: FloatArray
    """5th percentile of the draws, [sizes]."""
    high: FloatArray
    """95th percentile of the draws, [sizes]."""


def random_grouping(
    workloads: ArrayLike,
    *,
    packs: int,
    pool_sizes: ArrayLike,
    draws: int = 1000,
    seed: int = 0,
) -> RandomGrouping:
    """Draw `draws` windows of `packs` packs from `workloads` [corpus] and group each in its order.

    A window holds no pack twice.  All pool sizes group the same windows.  Same seed, same figures.

    Raises ValueError for workloads that are negative or not finite, a corpus of fewer than `packs`
    packs, and pool sizes that don't divide `packs`.
    """
    weights = np.asarray(check_workloads(workloads), dtype=np.float64)
    check_count("packs", packs)
    check_count("draws", draws)
    check_count("seed", seed, least=0)
    sizes = np.atleast_1d(np.asarray(pool_sizes, dtype=np.int64))
    if len(weights) < packs:
        raise ValueError(f"the corpus has {len(weights)} packs, less than one window of {packs}")
    wrong = [size for size in sizes.tolist() if size < 1 or packs % size]
    if wrong:
        raise ValueError(f"pool_sizes holds {wrong[0]}, which does not divide packs={packs}")
    found = np.empty((len(sizes), draws))
    source = np.random.default_rng(seed)
    per_shuffle = len(weights) // packs
    for start in range(0, draws, per_shuffle):
        count = min(per_shuffle, draws - start)
        windows = source.permutation(weights)[: count * packs].reshape(count, packs)
        mean = windows.mean(axis=1)
        for i, size in enumerate(sizes.tolist()):
            heaviest = windows.reshape(count, -1, size).mean(axis=2).max(axis=1)
            # a window of padding only is balanced
            ratio = np.divide(heaviest, mean, out=np.ones(count), where=mean > 0)
            found[i, start : start + count] = ratio - 1.0
    error = found.std(axis=1, ddof=1) / np.sqrt(draws) if draws > 1 else np.zeros(len(sizes))
    low, high = np.percentile(found, [5, 95], axis=1)
    return RandomGrouping(
        pool_sizes=sizes, imbalance=found.mean(axis=1), error=error, low=low, high=high
    )
