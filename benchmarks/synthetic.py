"""Sample lengths like those of a long-context training corpus, and how unequal its pools are.

    body   exp(N(ln median, sigma))                                nearly all samples
    tail   Pareto(alpha) between `tail_start` and `longest`,       few samples, nearly all work
           or `longest` itself with probability `at_longest`

Tail samples come in runs (parts of one repository, volumes of one work), so heavy packs follow each
other as in a production sampler's order: that unbalances contiguous pools and leaves VRSP's pools
as they are.  The two presets are fitted so that packs made by `libra.pack_best_fit` with a buffer
of 128 samples show the pool imbalances published in the Libra paper, whose corpora are private.

    python benchmarks/synthetic.py --mix tests/data/lengths-mix.npy --markdown synthetic.md

prints the pool imbalance of generated and real corpora next to the paper's figures.  Generated
samples are packed by `libra.pack_best_fit` and windows taken in that order; real ones also by best
fit over one window's tokens, shuffled inside a window.  *Before*: packs grouped in the order of the
corpus.  *After*: VRSP as published.  *Refined*: after swaps, over windows whose heaviest pack
weighs no more than a pool.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tyro
from numpy.typing import NDArray

import libra
from libra.config import check_count, check_fields
from libra.data.lengths import MAX_LENGTH
from libra.simulate.pooling import PoolCurve, pool_curve

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
        check_fields(
            self, zero=("sigma", "tail_share", "at_longest"), shares=("tail_share", "at_longest")
        )
        for name, allowed, need in (
            ("median", self.median >= 1, ">= 1"),
            ("tail_run", self.tail_run >= 1, ">= 1"),
            ("tail_share", self.tail_share < 1, "below 1"),
            ("longest", self.longest <= MAX_LENGTH, f"at most {MAX_LENGTH}"),
            ("tail_start", self.tail_start <= self.longest, f"at most longest={self.longest}"),
        ):
            if not allowed:
                raise ValueError(f"LengthModel.{name} is {getattr(self, name)}; it must be {need}")


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
    model: LengthModel, samples: int | None = None, *, seed: int = 0
) -> Iterator[IntArray]:
    """Sample lengths in int64 arrays of 2^18 samples, the last one shorter.

    `samples` None goes on forever.  The stream depends on model and seed alone (on one version of
    numpy, which may change how it draws).

    Raises ValueError for a count that is not positive and a negative seed.
    """
    if samples is not None:
        check_count("samples", samples)
    check_count("seed", seed, least=0)
    firsts = itertools.count(0, _BLOCK) if samples is None else range(0, samples, _BLOCK)
    return (
        _draw_block(model, seed, block)[: None if samples is None else samples - first]
        for block, first in enumerate(firsts)
    )


def generate_tokens(model: LengthModel, tokens: float, seed: int) -> IntArray:
    """The first sample lengths of a corpus, at least so many tokens."""
    lengths: list[IntArray] = []
    for drawn in generate_lengths(model, seed=seed):
        lengths.append(drawn)
        tokens -= int(drawn.sum())
        if tokens <= 0:
            break
    return np.concatenate(lengths)


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


POOL_SIZES = (2, 4, 8, 16)
BUFFER = 128
"""Samples that the packer chooses from: with many more, those of exactly L tokens wait long."""

# Table 1 of the paper: (before, after) for P = 2, 4, 8, 16.
PAPER: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {
    ("256K", 128): ((3.4617, 2.3059), (1.9776, 0.6635), (1.0770, 0.0050), (0.5616, 0.0006)),
    ("256K", 256): ((3.9431, 2.3012), (2.2960, 0.6610), (1.2895, 0.0042), (0.7059, 0.0006)),
    ("1M", 32): ((1.8732, 1.0069), (1.0476, 0.1078), (0.5247, 0.0066), (0.2000, 0.0009)),
    ("1M", 64): ((2.1719, 0.9853), (1.3098, 0.0650), (0.7294, 0.0055), (0.3641, 0.0008)),
}
MODELS = {"256K": CORPUS_256K, "1M": CORPUS_1M}


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to measure."""

    packs: int = 16_384
    """Packs of 256K tokens for each seed; a quarter as many of 1M."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    """Seeds of the generator; figures are means over all their windows."""
    mix: Path | None = None
    """Real sample lengths, .npy, measured at 1M next to them."""
    markdown: Path | None = None
    """Write the tables there too."""


def generated_packs(model: LengthModel, packs: int, seed: int) -> IntArray:
    """Workloads of the first `packs` packs of a generated corpus."""
    wanted = (packs + 2) * model.longest  # the packer's buffer holds a pack or two back
    lengths = generate_tokens(model, wanted, seed)
    return libra.pack_best_fit(lengths, model.longest, buffer=BUFFER).workloads[:packs]


def windows_of(workloads: IntArray, global_batch: int) -> IntArray:
    """Whole windows, [windows, GBS]."""
    whole = len(workloads) // global_batch
    return workloads[: whole * global_batch].reshape(whole, global_batch)


def cut_to(lengths: NDArray[Any], tokens: int) -> IntArray:
    """Samples above `tokens` cut into pieces of that length and a rest, in place."""
    whole = lengths.astype(np.int64)
    pieces = -(-whole // tokens)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    before = (np.arange(int(pieces.sum())) - first) * tokens
    return np.minimum(np.repeat(whole, pieces) - before, tokens)


def window_best_fit(lengths: IntArray, tokens: int, global_batch: int) -> Iterator[IntArray]:
    """Workloads of windows packed one at a time, [GBS] each, in shuffled order.

    The buffer takes samples in order until they hold one window's tokens; GBS packs are filled from
    it, the longest sample that fits first, and what is left stays in the buffer.
    """
    source = np.random.default_rng(0)
    ends = np.cumsum(lengths)
    waiting: list[tuple[int, int]] = []  # (length, -index), ascending: the oldest of equals last
    taken, held = 0, 0
    while True:
        goal = global_batch * tokens - held + (int(ends[taken - 1]) if taken else 0)
        if goal > ends[-1]:
            return
        stop = int(np.searchsorted(ends, goal)) + 1
        fresh = zip(lengths[taken:stop].tolist(), range(-taken, -stop, -1), strict=True)
        waiting, taken = sorted([*waiting, *fresh]), stop
        packs = [_fill(waiting, tokens) for _ in range(global_batch)]
        held = sum(length for length, _ in waiting)
        yield source.permutation(np.array(packs, dtype=np.int64))


def _fill(waiting: list[tuple[int, int]], tokens: int) -> int:
    """Take one pack from the buffer; its workload."""
    room, workload = tokens, 0
    while at := bisect_right(waiting, (room, 1)):
        length, _ = waiting.pop(at - 1)
        room, workload = room - length, workload + length * length
    return workload


def main(args: Args) -> None:
    """Measure, print, write."""
    lines = ["| corpus | GBS | windows | P | before | paper | after | paper | refined |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, model in MODELS.items():
        count = args.packs if name == "256K" else args.packs // 4
        corpora = [generated_packs(model, count, seed) for seed in args.seeds]
        for batch in (batch for corpus, batch in PAPER if corpus == name):
            curves = [pool_curve(windows_of(each, batch), POOL_SIZES) for each in corpora]
            lines += rows(f"{name}, generated", batch, curves, PAPER[name, batch])
    if args.mix is not None:
        lengths = cut_to(np.load(args.mix, allow_pickle=False), CORPUS_1M.longest)
        for batch in (32, 64):
            published = PAPER["1M", batch]
            found = pool_curve(window_best_fit(lengths, CORPUS_1M.longest, batch), POOL_SIZES)
            lines += rows("1M, real mix", batch, [found], published)
            packs = libra.pack_best_fit(lengths, CORPUS_1M.longest, buffer=BUFFER).workloads
            found = pool_curve(windows_of(packs, batch), POOL_SIZES)
            lines += rows("1M, real mix, `pack_best_fit`", batch, [found], published)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text)


def rows(
    corpus: str,
    batch: int,
    per_seed: Sequence[PoolCurve],
    published: Sequence[tuple[float, float]],
) -> Iterator[str]:
    """Markdown rows of one column of the paper's table; with several seeds their spread."""
    windows = sum(map(len, per_seed))
    for i, size in enumerate(POOL_SIZES):
        before = spread([curve.before[:, i].mean() for curve in per_seed])
        after = spread([curve.placed[:, i].mean() for curve in per_seed])
        fits = [curve.refined[curve.heaviest <= size, i] for curve in per_seed]
        pooled = np.concatenate(fits)
        refined = f"{pooled.mean():.4f} ({len(pooled)})" if len(pooled) else "none fits"
        paper_before, paper_after = published[i]
        head = f"| {corpus} | {batch} | {windows}" if not i else "| | |"
        yield (
            f"{head} | {size} | {before} | {paper_before:.4f} | {after} | {paper_after:.4f} "
            f"| {refined} |"
        )


def spread(means: Sequence[float]) -> str:
    """Mean of the seeds' means, and how far they lie from it at most."""
    middle = float(np.mean(means))
    if len(means) == 1:
        return f"{middle:.4f}"
    return f"{middle:.4f} ± {float(np.abs(np.array(means) - middle).max()):.4f}"


if __name__ == "__main__":
    main(tyro.cli(Args))
