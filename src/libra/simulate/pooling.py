"""How equal the pools of a window are, against the pool size P: no plans, workloads alone.

All figures are imbalances *between pools*: the heaviest pool's workload over the mean pool's, minus
1.  Larger pools balance by the law of large numbers, which is here as a formula
(`expected_imbalance`) and by drawing (`random_grouping`); `pool_curve` says how much better VRSP
and its refinement are on the same packs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import check_count
from libra.data.lengths import Loads, check_workloads
from libra.data.pools import (
    bound,
    check_pool_size,
    contiguous_pools,
    imbalance,
    place_packs,
    pool_loads,
    refine_pools,
)
from libra.simulate.results import CorpusSummary, PackSummary, PoolingPoint

FloatArray = NDArray[np.float64]

_CURVE_WINDOWS: Final = 500
"""Most windows that `pooling_points` groups, spread over the corpus."""
_BOUND_WINDOWS: Final = 50
"""Most of those for which the bound is computed, which takes longest."""


def summarise_packs(workloads: FloatArray, corpus: CorpusSummary, tokens: int) -> PackSummary:
    """How unequal packs of `tokens` tokens are; `workloads` [windows, GBS]."""
    packs = workloads.ravel()
    mean = max(float(packs.mean()), 1.0)
    means = np.maximum(workloads.mean(axis=1), 1.0)
    return PackSummary(
        quantiles=tuple((np.percentile(packs, np.arange(101)) / mean).tolist()),
        cv=variation(packs),
        heaviest=float((workloads.max(axis=1) / means).mean()),
        padding_share=corpus.padding_tokens / (tokens * packs.size),
    )


def pooling_points(workloads: FloatArray, *, seed: int) -> tuple[PoolingPoint, ...]:
    """Imbalance between pools for every power of two that divides GBS and is less than it.

    `workloads` [windows, GBS] are the packs' of every window of the corpus.
    """
    batch = workloads.shape[1]
    # The powers of two below GBS: of 12, for example, 1 2 4 (8 does not divide it).
    powers = (1 << i for i in range((batch - 1).bit_length()))
    sizes = [size for size in powers if batch % size == 0]
    if not sizes:
        return ()
    # Step 1: packs as they come and as placed, on windows spread over the corpus.
    chosen = np.linspace(0, len(workloads) - 1, _CURVE_WINDOWS).round().astype(int)
    windows = workloads[np.unique(chosen)]
    curve = pool_curve([window.astype(np.int64) for window in windows], sizes)
    # Step 2: packs of the whole corpus at random, drawn and by the formula.
    packs = workloads.ravel()
    drawn = random_grouping(packs, packs=batch, pool_sizes=sizes, draws=400, seed=seed)
    theory = expected_imbalance(variation(packs), batch, sizes)
    return tuple(
        PoolingPoint(
            pool_size=size,
            before=float(curve.before[:, i].mean()),
            after_greedy=float(curve.placed[:, i].mean()),
            after=float(curve.refined[:, i].mean()),
            random=float(drawn[i]),
            theory=float(theory[i]),
            bound=_mean_bound(windows[:_BOUND_WINDOWS], size),
        )
        for i, size in enumerate(sizes)
    )


def _mean_bound(windows: FloatArray, size: int) -> float:
    """Least imbalance that pools of `size` could reach, mean over the windows [windows, GBS]."""
    least = [bound(window, size) / max(window.mean() * size, 1.0) - 1 for window in windows]
    return float(np.mean(least))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolCurve:
    """Imbalance between the pools of each window, max / mean - 1 of their workloads."""

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
    checked = [check_workloads(weights) for weights in windows]
    if not checked:
        raise ValueError("there is no window: the corpus is smaller than one global batch")
    # Three figures a window and size, [windows, sizes, 3].
    rows = [[_imbalances(weights, size) for size in pool_sizes] for weights in checked]
    before, placed, refined = np.array(rows).transpose(2, 0, 1)
    heaviest = np.array([heaviest_pack(weights) for weights in checked])
    return PoolCurve(before=before, placed=placed, refined=refined, heaviest=heaviest)


def heaviest_pack(workloads: Loads) -> float:
    """Workload of a window's heaviest pack over the mean pack's; 1 where all are zero."""
    mean = float(workloads.mean())
    return float(workloads.max()) / mean if mean else 1.0


def _imbalances(weights: Loads, size: int) -> list[float]:
    """Imbalance of a window's pools in sampler order, by VRSP, and refined."""
    placed = place_packs(weights, size)
    groupings = contiguous_pools(len(weights), size), placed, refine_pools(weights, placed)
    return [imbalance(pool_loads(weights, pools)) for pools in groupings]


def expected_imbalance(variation: ArrayLike, packs: ArrayLike, pool_size: ArrayLike) -> FloatArray:
    """E[R] - 1 of D = `packs` grouped at random into D / P pools: CV / sqrt(P) * sqrt(2 ln(D / P)).

    `variation` is the CV (standard deviation over mean) of pack workloads.  Arguments broadcast; 0
    where one pool holds all.  The formula assumes many pools with normally distributed loads, so it
    lies above the imbalance of a few pools, and a single outlier is outside of it.

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


def random_grouping(
    workloads: ArrayLike,
    *,
    packs: int,
    pool_sizes: Sequence[int],
    draws: int = 1000,
    seed: int = 0,
) -> FloatArray:
    """Mean imbalance of pools of each size, [sizes], when packs are grouped at random.

    Draws `draws` windows of `packs` packs from `workloads` [corpus] and groups each in its order.
    A window holds no pack twice.  All pool sizes group the same windows.  Same seed, same figures.

    Raises ValueError for workloads that are negative or not finite, a corpus of fewer than `packs`
    packs, and pool sizes that don't divide `packs`.
    """
    weights = np.asarray(check_workloads(workloads), dtype=np.float64)
    check_count("packs", packs)
    check_count("draws", draws)
    check_count("seed", seed, least=0)
    if len(weights) < packs:
        raise ValueError(f"the corpus has {len(weights)} packs, less than one window of {packs}")
    for size in pool_sizes:
        check_pool_size(packs, size)
    found = np.empty((len(pool_sizes), draws))
    source = np.random.default_rng(seed)
    # One shuffle of the corpus gives as many windows as fit into it.
    per_shuffle = len(weights) // packs
    for start in range(0, draws, per_shuffle):
        count = min(per_shuffle, draws - start)
        windows = source.permutation(weights)[: count * packs].reshape(count, packs)
        mean = windows.mean(axis=1)
        # Pools of neighbours: [windows, packs] to [windows, pools, P].
        for i, size in enumerate(pool_sizes):
            heaviest = windows.reshape(count, -1, size).mean(axis=2).max(axis=1)
            # A window of padding only is balanced.
            ratio = np.divide(heaviest, mean, out=np.ones(count), where=mean > 0)
            found[i, start : start + count] = ratio - 1.0
    means: FloatArray = found.mean(axis=1)
    return means
