"""How long samples are, in constant memory: counts and tokens in bins that grow by 2^(1/8)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import MAX_LENGTH, check_lengths

IntArray = NDArray[np.int64]

BINS_PER_OCTAVE: Final = 8
_TABLE: Final = 1 << 16


@cache
def bin_edges() -> IntArray:
    """First length of each bin, then one past the last length, int64 [bins + 1].

    2^(i/8), rounded up to integers: lengths up to 9 have bins of their own, and no bin is wider
    than a ninth of its lengths, rounding aside.
    """
    octaves = int(np.log2(MAX_LENGTH))
    steps = np.arange(BINS_PER_OCTAVE) / BINS_PER_OCTAVE
    grown = [np.ceil(np.exp2(steps + octave)).astype(np.int64) for octave in range(octaves)]
    edges = np.unique(np.concatenate([*grown, [MAX_LENGTH, MAX_LENGTH + 1]]))
    edges.flags.writeable = False
    return edges


@cache
def _bin_of_short() -> IntArray:
    """The bin of every length below 2^16, where nearly all samples lie: faster than a search."""
    return np.searchsorted(bin_edges(), np.arange(_TABLE), side="right") - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthHistogram:
    """Samples and their tokens by length; add two to get that of both."""

    samples: IntArray
    """Samples in each bin of `bin_edges`, [bins]."""
    tokens: IntArray
    """Their tokens, [bins]."""
    shortest: int
    """Tokens of the shortest sample; 0 where there is none."""
    longest: int

    def __add__(self, other: LengthHistogram) -> LengthHistogram:
        some = [h.shortest for h in (self, other) if h.longest]
        return LengthHistogram(
            samples=self.samples + other.samples,
            tokens=self.tokens + other.tokens,
            shortest=min(some, default=0),
            longest=max(self.longest, other.longest),
        )

    @property
    def mean(self) -> float:
        """Mean tokens of a sample; 0 where there is none.  Exact."""
        count = int(self.samples.sum())
        return int(self.tokens.sum()) / count if count else 0.0

    def quantile(self, q: float) -> float:
        """The length that a part `q` of the samples does not exceed; 0.5 for the median.

        Known to the width of a bin, at most a ninth; exact at 0 and 1 and where bins hold one
        length.
        """
        return self._quantile(q, self.samples)

    def token_quantile(self, q: float) -> float:
        """The length whose samples, and all shorter ones, hold a part `q` of the tokens."""
        return self._quantile(q, self.tokens)

    def _quantile(self, q: float, weights: IntArray) -> float:
        if not 0 <= q <= 1:
            raise ValueError(f"q is {q}; it must lie in [0, 1]")
        if not self.longest:
            raise ValueError("no sample has been counted, so there is no quantile")
        reached = np.cumsum(weights)
        wanted = q * int(reached[-1])
        i = int(np.searchsorted(reached, wanted))
        i = max(i, int(np.argmax(weights > 0)))  # q = 0 asks for the first bin that holds any
        low, high = int(bin_edges()[i]), int(bin_edges()[i + 1]) - 1
        into = (wanted - int(reached[i] - weights[i])) / int(weights[i])
        value = low + (high - low) * min(max(into, 0.0), 1.0)
        return float(min(max(value, self.shortest), self.longest))

    def as_dict(self) -> dict[str, Any]:
        """Bins from the first that holds a sample to the last, for JSON: lists of one length each.

        `from` is the first length of a bin, `to` the last.
        """
        held = np.flatnonzero(self.samples)
        part = slice(int(held[0]), int(held[-1]) + 1) if len(held) else slice(0, 0)
        return {
            "from": bin_edges()[:-1][part].tolist(),
            "to": (bin_edges()[1:][part] - 1).tolist(),
            "samples": self.samples[part].tolist(),
            "tokens": self.tokens[part].tolist(),
            "shortest": self.shortest,
            "longest": self.longest,
        }


def count_lengths(lengths: IntArray) -> LengthHistogram:
    """The histogram of some lengths, integers in [1, 2^31]; ValueError for others."""
    checked = check_lengths(lengths)
    edges = bin_edges()
    count = len(edges) - 1
    if not len(checked):
        empty = np.zeros(count, dtype=np.int64)
        return LengthHistogram(samples=empty, tokens=empty, shortest=0, longest=0)
    short = _bin_of_short()
    bins = short[np.minimum(checked, _TABLE - 1)]
    long = np.flatnonzero(checked >= _TABLE)
    bins[long] = np.searchsorted(edges, checked[long], side="right") - 1
    return LengthHistogram(
        samples=np.bincount(bins, minlength=count),
        tokens=_sums(bins, checked, count),
        shortest=int(checked.min()),
        longest=int(checked.max()),
    )


def _sums(bins: IntArray, lengths: IntArray, count: int) -> IntArray:
    """Sum of the lengths in each bin; float sums of integers below 2^53 are exact."""
    pieces = range(0, len(lengths), 1 << 20)  # 2^20 lengths of at most 2^31 stay below
    sums = np.zeros(count, dtype=np.int64)
    for first in pieces:
        part = slice(first, first + (1 << 20))
        sums += np.bincount(bins[part], lengths[part], count).astype(np.int64)
    return sums
