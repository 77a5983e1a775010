"""A sample of the windows of a long corpus, and estimates for the corpus from it.

Windows are sorted by one number (how heavy their heaviest pack is, or the CV of their packs) and
cut into strata of similar windows; every stratum gives its share.  Skew decides most figures, so a
stratified mean is far more certain than one of windows drawn at random.

    skew      1.2 1.3 1.5 1.6 | 2.0 2.1 3.0 9.0     two strata of four windows
    replayed       x       x     x           x      two of each
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import check_count
from libra.data.lengths import IntArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowSample:
    """Windows to replay, all of them or some of each stratum."""

    windows: IntArray
    """Windows chosen, ascending, [chosen]."""
    stratum: IntArray
    """Stratum of each, [chosen]."""
    sizes: IntArray
    """Windows of the corpus in each stratum, [strata]."""


def every_window(count: int) -> WindowSample:
    """All of `count` windows: estimates are then the corpus's own means."""
    return WindowSample(
        windows=np.arange(count, dtype=np.int64),
        stratum=np.zeros(count, dtype=np.int64),
        sizes=np.array([count], dtype=np.int64),
    )


def sample_windows(skew: ArrayLike, count: int, *, seed: int = 0) -> WindowSample:
    """Choose `count` windows at random, equally many in every stratum of `skew` [windows], finite.

    There is a stratum for each four windows chosen, at most 16: a stratum needs two windows for its
    variance.  All windows where `count` reaches them.  Same seed, same windows.

    Raises ValueError for skews that are not finite, and fewer than 2 windows.
    """
    values = np.asarray(skew, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"skew must hold one finite number a window; got shape {values.shape}")
    if check_count("count", count) >= len(values):
        return every_window(len(values))
    check_count("count", count, least=2)
    strata = min(16, max(1, count // 4))
    source = np.random.default_rng(check_count("seed", seed, least=0))
    # Step 1: cut the windows, sorted by skew, into strata, and `count` into their shares.
    groups = np.array_split(np.argsort(values, kind="stable"), strata)
    shares = [len(part) for part in np.array_split(np.arange(count), strata)]
    # Step 2: draw the share of each stratum.
    drawn = [source.permutation(part)[:n] for part, n in zip(groups, shares, strict=True)]
    windows, stratum = np.concatenate(drawn), np.repeat(np.arange(strata), shares)
    order = np.argsort(windows)
    return WindowSample(
        windows=windows[order],
        stratum=stratum[order],
        sizes=np.array([len(group) for group in groups], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over the corpus's windows, its confidence interval, and the largest value seen."""

    mean: float
    low: float
    """Lower end of the 95% confidence interval; the mean itself where all windows were seen."""
    high: float
    """Upper end of the same interval."""
    most: float
    """Largest value seen."""


def estimate(values: FloatArray, sample: WindowSample) -> Estimate:
    """Stratified mean of `values` [chosen] over the corpus, with its 95% interval.

    Variances of the strata's means are shrunk by the part of each stratum that was seen; Student's
    t with the degrees of freedom that all strata have together.
    """
    # Step 1: the mean of each stratum, weighted by its windows in the corpus.
    weight = sample.sizes / sample.sizes.sum()
    seen = np.bincount(sample.stratum, minlength=len(weight))
    means = np.bincount(sample.stratum, weights=values, minlength=len(weight)) / seen
    mean = float(weight @ means)
    # Step 2: the variance of each stratum's mean; 0 where all of its windows were seen.
    off = values - means[sample.stratum]
    squares = np.bincount(sample.stratum, weights=off * off, minlength=len(weight))
    unseen = 1.0 - seen / sample.sizes
    spread = squares / np.maximum(seen - 1, 1) / seen * unseen
    freedom = int(np.maximum(seen - 1, 0).sum())
    half = math.sqrt(float(weight**2 @ spread)) * (_student(freedom) if freedom else 0.0)
    return Estimate(mean=mean, low=mean - half, high=mean + half, most=float(values.max()))


def _student(freedom: int) -> float:
    """97.5th percentile of Student's t: exact for 1 and 2, else Cornish-Fisher to 1%."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2.0 / (1.0 - 0.95**2))
    z = NormalDist().inv_cdf(0.975)
    terms: tuple[float, ...] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / freedom**i for i, term in enumerate(terms))
