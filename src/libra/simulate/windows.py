"""From a stream of lengths to windows of GBS packs, without ever holding the corpus.

    chunks of lengths -> refuse, drop or cut -> packer -> packs -> windows of exactly GBS packs

A window is what one optimizer step trains on; the packs that are left at the end fill none.

A packer takes a stream of samples and yields the packs of `libra.data.packing` as soon as they are
full.  It holds no more than the next pack needs: less than a pack of tokens in sequence, a buffer
of samples and the open pack in best fit.

    samples (rows of Pieces)     5 7 4 6 2      packs of 8 tokens, in sequence
    pieces of whole packs        5 3 4 4        held for the next pack: 6 2
    which of them open a pack    1 0 1 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Final, get_args

import numpy as np
from numpy.typing import ArrayLike

from libra.config import check_choice, check_count
from libra.data.lengths import MAX_LENGTH, IntArray, check_lengths
from libra.data.packing import LongerCut, Packing, Packs, pack_sequential
from libra.simulate.results import CorpusSummary, LengthBins

_BINS_PER_OCTAVE: Final = 8

Pieces = IntArray
"""Samples or pieces of them, int64 [4, pieces]: tokens, index in the corpus, first token in the
sample, and 1 for the first piece of a pack, else 0.
"""

_DEFAULT_BUFFER: Final = 4096
"""Samples that best-fit packing chooses from, as in `libra.data.packing.pack_best_fit`."""

_LENGTH, _SAMPLE, _START, _OPENS = range(4)
_NOTHING: Final[Pieces] = np.empty((4, 0), dtype=np.int64)


@cache
def bin_edges() -> IntArray:
    """First length of each histogram bin, then one past the last length, int64 [bins + 1].

    2^(i/8), rounded up to integers: lengths up to 9 have bins of their own, and no bin is wider
    than a ninth of its lengths, rounding aside.
    """
    octaves = int(np.log2(MAX_LENGTH))
    steps = np.arange(_BINS_PER_OCTAVE) / _BINS_PER_OCTAVE
    grown = [np.ceil(np.exp2(steps + octave)).astype(np.int64) for octave in range(octaves)]
    edges = np.unique(np.concatenate([*grown, [MAX_LENGTH, MAX_LENGTH + 1]]))
    edges.flags.writeable = False
    return edges


@dataclass(kw_only=True, eq=False)
class WindowReader:
    """Windows of a corpus, read once: iterating gives `Packs` of exactly `packs` packs each.

    They are the packs of `pack_sequential` or `pack_best_fit` over the whole corpus, in order, and
    `samples` are indices in the corpus.  Memory holds a chunk, a window and best fit's buffer.

    Raises ValueError for bad arguments; iterating raises it for bad lengths, and for a corpus that
    fills no window.
    """

    chunks: Iterable[ArrayLike] = field(kw_only=False)
    """Integer lengths in tokens; where they are parted changes nothing."""
    tokens: int
    """L: tokens of a pack."""
    packs: int
    """GBS: packs of a window."""
    packing: Packing = "sequential"
    longer: LongerCut = "drop"
    """Samples of more than L tokens: `refuse` them, `drop` them, or `cut` them: in sequence like
    any other sample, for best fit into pieces of L tokens and a rest, each a sample of its own.
    """
    buffer: int | None = None
    """Samples that best fit chooses from; 4,096 unless given."""

    def __post_init__(self) -> None:
        if check_count("tokens", self.tokens) >= MAX_LENGTH:
            raise ValueError(
                f"tokens is {self.tokens}; L must be less than 2^31, for cu_seqlens are int32"
            )
        check_count("packs", self.packs)
        check_choice("packing", self.packing, get_args(Packing))
        check_choice("longer", self.longer, get_args(LongerCut))
        if self.buffer is not None:
            check_count("buffer", self.buffer)
            if self.packing != "best-fit":
                raise ValueError(
                    f"buffer is {self.buffer} but packing is {self.packing!r}; only best-fit has "
                    "one"
                )
        self._started = False
        self._counts: Counter[str] = Counter()
        self._shortest, self._longest = MAX_LENGTH, 0
        self._bins = np.zeros((2, len(bin_edges()) - 1), dtype=np.int64)  # samples, tokens

    @property
    def summary(self) -> CorpusSummary:
        """Everything that has been read so far; complete once iterating has ended."""
        counts = self._counts
        used = counts["tokens_in_windows"]
        return CorpusSummary(
            samples=counts["samples"],
            tokens=counts["tokens"],
            median=self._median(),
            mean=counts["tokens"] / max(counts["samples"], 1),
            longest=self._longest,
            dropped_samples=counts["dropped_samples"],
            dropped_tokens=counts["dropped_tokens"],
            cut_samples=counts["cut_samples"],
            padding_tokens=counts["windows"] * self.packs * self.tokens - used,
            left_over_tokens=counts["tokens"] - counts["dropped_tokens"] - used,
            windows=counts["windows"],
            histogram=self._histogram(),
        )

    def _median(self) -> float:
        """Median length, interpolated inside its bin; 0 where there is no sample."""
        samples, half = self._bins[0], self._counts["samples"] / 2
        if not half:
            return 0.0
        # Samples in this bin and all before it; half of the corpus is reached in bin i.
        reached = np.cumsum(samples)
        i = int(np.searchsorted(reached, half))
        low, high = int(bin_edges()[i]), int(bin_edges()[i + 1]) - 1
        before = int(reached[i] - samples[i])
        value = low + (high - low) * (half - before) / int(samples[i])
        return min(max(value, self._shortest), self._longest)

    def _histogram(self) -> LengthBins:
        """Bins from the first that holds a sample to the last."""
        held = np.flatnonzero(self._bins[0])
        first, stop = (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)
        samples, tokens = self._bins[:, first:stop]
        # Lengths of a bin are similar, so their squares sum to tokens^2 / samples.
        squares = tokens.astype(np.float64) ** 2 / np.maximum(samples, 1)
        return LengthBins(
            edges=tuple(bin_edges()[first : stop + 1].tolist()),
            samples=tuple(samples.tolist()),
            tokens=tuple(tokens.tolist()),
            squares=tuple(squares.tolist()),
        )

    def __iter__(self) -> Iterator[Packs]:
        if self._started:
            raise ValueError("a WindowReader reads its corpus once; make another to read it again")
        self._started = True
        return self._read()

    def _read(self) -> Iterator[Packs]:
        pieces = map(self._admit, self.chunks)
        runs = (
            stream_sequential(pieces, self.tokens)
            if self.packing == "sequential"
            else stream_best_fit(pieces, self.tokens, self.buffer or _DEFAULT_BUFFER)
        )
        for window in self._group(runs):
            self._counts.update(windows=1, tokens_in_windows=int(window.lengths.sum()))
            yield window
        if not self._counts["windows"]:
            raise ValueError(self._why_no_window())

    def _group(self, runs: Iterable[Pieces]) -> Iterator[Packs]:
        """The packs of all runs in windows of GBS packs."""
        held = _NOTHING
        for run in runs:
            # Step 1: the first piece of every pack that is held, then the number of pieces.
            pieces = np.concatenate([held, run], axis=1)
            firsts = np.append(np.flatnonzero(pieces[_OPENS]), pieces.shape[1])
            # Step 2: whole windows from the front; the rest is held.
            whole = (len(firsts) - 1) // self.packs
            for first in range(0, whole * self.packs, self.packs):
                offsets = firsts[first : first + self.packs + 1]
                lengths, samples, starts, _ = pieces[:, offsets[0] : offsets[-1]]
                yield Packs(
                    tokens=self.tokens,
                    lengths=lengths,
                    offsets=offsets - offsets[0],
                    samples=samples,
                    starts=starts,
                )
            held = pieces[:, firsts[whole * self.packs] :]

    def _admit(self, chunk: ArrayLike) -> Pieces:
        """Check and count a chunk; the pieces to pack."""
        # Step 1: refuse bad lengths by their place in the corpus.
        first = self._counts["samples"]
        lengths = check_lengths(chunk, name=f"lengths (from sample {first} of the corpus)")
        too_long = lengths > self.tokens
        count = int(too_long.sum())
        if count and self.longer == "refuse":
            i = int(np.argmax(too_long))
            raise ValueError(
                f"sample {first + i} of the corpus has {lengths[i]} tokens, more than a "
                f"pack of tokens={self.tokens}; choose longer='drop' or longer='cut', or a larger "
                "tokens"
            )
        # Step 2: count all samples, then drop or cut longer ones.
        self._count(lengths)
        pieces = whole_samples(lengths, first)
        if not count:
            return pieces
        if self.longer == "drop":
            dropped = int(lengths[too_long].sum())
            self._counts.update(dropped_samples=count, dropped_tokens=dropped)
            return pieces[:, ~too_long]
        self._counts["cut_samples"] += count
        return pieces if self.packing == "sequential" else cut_longer(pieces, self.tokens)

    def _count(self, lengths: IntArray) -> None:
        """Add a chunk to the counts of the corpus."""
        self._counts.update(samples=len(lengths), tokens=int(lengths.sum()))
        self._shortest = min(self._shortest, int(lengths.min(initial=MAX_LENGTH)))
        self._longest = max(self._longest, int(lengths.max(initial=0)))
        # Edges 1 2 3: lengths 1 2 2 lie in bins 0 1 1.
        bins = np.searchsorted(bin_edges(), lengths, side="right") - 1
        self._bins[0] += np.bincount(bins, minlength=self._bins.shape[1])
        np.add.at(self._bins[1], bins, lengths)

    def _why_no_window(self) -> str:
        found = self.summary
        if not found.samples:
            return "the corpus is empty: it holds no sample"
        dropped = ""
        if found.dropped_samples:
            dropped = (
                f" ({found.dropped_samples} of {found.samples} samples are longer than a pack and "
                "were dropped)"
            )
        return (
            f"the corpus has {found.left_over_tokens} tokens{dropped}, less than one window of "
            f"packs={self.packs} packs of tokens={self.tokens}; choose fewer or shorter packs, "
            "or a larger corpus"
        )


def whole_samples(lengths: IntArray, first: int) -> Pieces:
    """Samples `first`, `first` + 1, ... of the corpus as pieces."""
    pieces = np.zeros((4, len(lengths)), dtype=np.int64)
    pieces[_LENGTH] = lengths
    pieces[_SAMPLE] = first + np.arange(len(lengths))
    return pieces


def cut_longer(pieces: Pieces, tokens: int) -> Pieces:
    """Samples of more than `tokens` tokens as pieces of `tokens` and a rest."""
    # Lengths 3 9 at 4 tokens: counts 1 3, sources 0 1 1 1, numbers 0 0 1 2, offsets 0 0 4 8.
    counts = -(-pieces[_LENGTH] // tokens)
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut = pieces[:, source]
    cut[_LENGTH] = np.minimum(cut[_LENGTH] - number * tokens, tokens)
    cut[_START] += number * tokens
    return cut


def stream_sequential(stream: Iterable[Pieces], tokens: int) -> Iterator[Pieces]:
    """The pieces of whole packs as of `pack_sequential`; the last, incomplete pack never comes."""
    opened = _NOTHING  # pieces of the open pack
    for pieces in stream:
        joined = np.concatenate([opened, pieces], axis=1)
        if not joined.size:
            continue
        packs = pack_sequential(joined[_LENGTH], tokens, longer="cut", drop_last=False)
        # A piece of a piece keeps its sample, and starts further on in it.
        packed = joined[:, packs.samples]
        packed[_LENGTH] = packs.lengths
        packed[_START] += packs.starts
        packed[_OPENS] = 0
        packed[_OPENS, packs.offsets[:-1]] = 1
        full = np.count_nonzero(packs.padding == 0)  # all packs, or all but the last
        end = int(packs.offsets[full])
        yield packed[:, :end]
        opened = packed[:, end:]


def stream_best_fit(stream: Iterable[Pieces], tokens: int, buffer: int) -> Iterator[Pieces]:
    """The pieces of whole packs as of `pack_best_fit`; the end of the stream completes the last."""
    from libra.data.packing_kernels import fill_packs  # numba: half a second to import

    waiting: list[Pieces] = []
    opened, room = _NOTHING, -1  # pieces of the open pack, and its free tokens
    for pieces in chain(stream, [None]):
        last = pieces is None
        waiting.append(_NOTHING if pieces is None else pieces)
        if not last and sum(each.shape[1] for each in waiting) < buffer:
            continue
        # Step 1: fill packs from the waiting samples, and keep the rest.
        joined = np.concatenate(waiting, axis=1)
        step = max(1, buffer // 16)
        order, opens, room = fill_packs(joined[_LENGTH], tokens, buffer, step, room, last)
        waiting = [np.delete(joined, order, axis=1)]
        # Step 2: part the whole packs from the open one, the last until the end of the stream.
        packed = np.concatenate([opened, joined[:, order]], axis=1)
        packed[_OPENS, opened.shape[1] :] = opens
        firsts = np.flatnonzero(packed[_OPENS])
        end = packed.shape[1] if last or not len(firsts) else int(firsts[-1])
        yield packed[:, :end]
        opened = packed[:, end:]
