"""Sample lengths like those of a long-context training corpus, drawn from a few parameters.

    body   exp(N(ln median, sigma))                                nearly all samples
    tail   Pareto(alpha) between `tail_start` and `longest`,       few samples, nearly all work
           or `longest` itself with probability `at_longest`

Tail samples come in runs (parts of one repository, volumes of one work), so heavy packs follow each
other as in a production sampler's order: that unbalances contiguous pools and leaves placed ones
as they are.  The two presets are fitted so that packs made by `libra.pack_best_fit` with a buffer
of 128 samples show the pool imbalances published in the Libra paper, whose corpora are private.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import MAX_LENGTH, check_count

IntArray = NDArray[np.int64]

_BLOCK: Final = 1 << 18
"""Samples drawn from one stream of random numbers: fits the caches, and is many windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """A distribution of sample lengths in tokens, and how tail samples follow each other."""

    median: float
    """Median of the lognormal body."""
    sigma: float
    """Standard deviation of the body's logarithm."""
    tail_share: float
    """Probability that a sample is a tail sample."""
    alpha: float
    """Exponent of the tail's Pareto distribution; smaller is heavier."""
    tail_start: int
    """Shortest tail sample."""
    longest: int
    """Longest sample: L of the packs that the corpus is for."""
    at_longest: float = 0.0
    """Share of the tail samples of exactly `longest` tokens."""
    tail_run: float = 1.0
    """Mean number of tail samples that follow each other; 1: none more than chance has it."""

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, for values that no distribution has."""
        for name in ("tail_start", "longest"):
            if check_count(f"LengthModel.{name}", getattr(self, name)) > MAX_LENGTH:
                raise ValueError(f"LengthModel.{name} is {getattr(self, name)}; at most 2^31")
        for name, least in (("median", 1), ("sigma", 0), ("alpha", 0), ("tail_run", 1)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least) or (name == "alpha" and value == 0):
                above = "> 0" if name == "alpha" else f">= {least}"
                raise ValueError(f"LengthModel.{name} is {value!r}; it must be finite and {above}")
        for name, share in (("tail_share", self.tail_share), ("at_longest", self.at_longest)):
            if not 0 <= share <= 1 or (name == "tail_share" and share == 1):
                below = "below 1" if name == "tail_share" else "at most 1"
                raise ValueError(f"LengthModel.{name} is {share!r}; a share is >= 0 and {below}")
        if self.tail_start > self.longest:
            raise ValueError(
                f"LengthModel.tail_start is {self.tail_start}, above longest={self.longest}"
            )


CORPUS_256K: Final = LengthModel(
    median=636,
    sigma=1.0,
    tail_share=0.0105,
    alpha=0.375,
    tail_start=6913,
    longest=256 * 1024,
    tail_run=1.5,
)
"""For packs of 256K tokens: the heaviest of 128 packs weighs about 6.6 mean packs."""

CORPUS_1M: Final = LengthModel(
    median=640,
    sigma=0.85,
    tail_share=0.0028,
    alpha=0.6,
    tail_start=80_000,
    longest=1024 * 1024,
    at_longest=0.06,
    tail_run=2.5,
)
"""For packs of 1M tokens: the heaviest of 32 packs weighs about 3.8 mean packs."""


def generate_lengths(
    model: LengthModel, samples: int | None = None, *, seed: int = 0, chunk: int = 1 << 20
) -> Iterator[IntArray]:
    """Sample lengths in int64 arrays of `chunk` samples, the last one shorter; memory is one chunk.

    `samples` None goes on forever.  The stream depends on model and seed alone, whatever
    the `chunk` (on one version of numpy, which may change how it draws).

    Raises ValueError for counts that are not positive and a negative seed.
    """
    if samples is not None:
        check_count("samples", samples)
    check_count("chunk", chunk)
    check_count("seed", seed, least=0)
    return _chunks(model, samples, seed, chunk)


def _chunks(model: LengthModel, samples: int | None, seed: int, chunk: int) -> Iterator[IntArray]:
    done, block, left = 0, 0, np.empty(0, dtype=np.int64)
    while samples is None or done < samples:
        wanted = chunk if samples is None else min(chunk, samples - done)
        out = np.empty(wanted, dtype=np.int64)
        filled = 0
        while filled < wanted:
            if not len(left):
                left = _draw_block(model, seed, block)
                block += 1
            taken = left[: wanted - filled]
            out[filled : filled + len(taken)] = taken
            filled += len(taken)
            left = left[len(taken) :]
        done += wanted
        yield out


def _draw_block(model: LengthModel, seed: int, block: int) -> IntArray:
    """Samples `block` * 2^18 .. of the stream, int64 [2^18]."""
    source = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(block,))))
    body = source.standard_normal(_BLOCK, dtype=np.float32)
    body *= np.float32(model.sigma)
    body += np.float32(math.log(model.median))
    np.exp(body, out=body)
    np.clip(body, 1, model.longest, out=body)
    lengths = np.rint(body, out=body).astype(np.int64)
    np.minimum(lengths, model.longest, out=lengths)  # float32 may round it up

    share = model.tail_share * _BLOCK
    count = int(share) + int(source.random() < share % 1)
    lengths[_tail_places(model, source, count)] = _draw_tail(model, source, count)
    return lengths


def _tail_places(model: LengthModel, source: np.random.Generator, count: int) -> IntArray:
    """Places of tail samples in a block, in runs that start anywhere; int64 [count], distinct."""
    places = np.empty(0, dtype=np.int64)
    # This many runs leave a share 1 - tail_share of the block untouched; one in ten to spare.
    runs = int(-math.log1p(-model.tail_share) * _BLOCK / model.tail_run * 1.1) + 1
    while len(places) < count:
        first = source.integers(0, _BLOCK, runs)
        length = source.geometric(1.0 / model.tail_run, runs)
        run = np.repeat(first - np.cumsum(length) + length, length) + np.arange(int(length.sum()))
        places = np.concatenate([places, run[run < _BLOCK]])  # a run ends with its block
        places = places[np.sort(np.unique(places, return_index=True)[1])]
    return places[:count]


def _draw_tail(model: LengthModel, source: np.random.Generator, count: int) -> IntArray:
    """Tail samples by inverting the distribution function, int64 [count].

    One from each of `count` equal parts of the distribution, so that few windows already have the
    corpus's figures.
    """
    part = (source.permutation(count) + source.random(count)) / max(count, 1)
    below = np.maximum(part - model.at_longest, 0.0) / max(1.0 - model.at_longest, 1e-9)
    kept = 1.0 - (model.tail_start / model.longest) ** model.alpha
    pareto = model.tail_start * (1.0 - below * kept) ** (-1.0 / model.alpha)
    lengths: IntArray = np.minimum(np.rint(pareto), model.longest).astype(np.int64)
    lengths[part < model.at_longest] = model.longest
    return lengths
