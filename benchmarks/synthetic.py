"""Pool imbalance of generated and real corpora beside the figures published in the Libra paper.

    python benchmarks/synthetic.py --mix tests/data/lengths-mix.npy --markdown synthetic.md

Generated samples are packed by `libra.pack_best_fit` and windows taken in that order; real ones
also by best fit over one window's tokens, shuffled inside a window.  *Before*: packs grouped
as they come.  *After*: VRSP as published.  *Refined*: after swaps, over windows whose heaviest pack
weighs no more than a pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray

import libra
from libra.simulate.pooling import PoolCurve, pool_curve
from libra.simulate.synthetic import CORPUS_1M, CORPUS_256K, LengthModel, generate_lengths

IntArray = NDArray[np.int64]

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
    """Real sample lengths, .npy, measured at 1M beside them."""
    markdown: Path | None = None
    """Write the tables there too."""


def generated_packs(model: LengthModel, packs: int, seed: int) -> IntArray:
    """Workloads of the first `packs` packs of a generated corpus."""
    lengths: list[IntArray] = []
    tokens, wanted = 0, (packs + 2) * model.longest  # the packer's buffer holds a pack or two back
    for chunk in generate_lengths(model, seed=seed):
        lengths.append(chunk)
        tokens += int(chunk.sum())
        if tokens >= wanted:
            break
    return libra.pack_best_fit(np.concatenate(lengths), model.longest, buffer=BUFFER).workloads[
        :packs
    ]


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
