"""From a stream of lengths to windows of GBS packs, without ever holding the corpus.

    chunks of lengths -> refuse, drop or cut -> packer -> packs -> windows of exactly GBS packs

A window is what one optimizer step trains on; the packs that are left at the end fill none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.data.lengths import MAX_LENGTH, check_count, check_lengths
from libra.data.packing import LongerCut, Packs
from libra.simulate.results import CorpusSummary, LengthBins
from libra.simulate.stream_packing import (
    DEFAULT_BUFFER,
    BestFitPacker,
    Packer,
    Packing,
    Pieces,
    SequentialPacker,
    cut_longer,
)

IntArray = NDArray[np.int64]

_BINS_PER_OCTAVE: Final = 8


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


class WindowReader:
    """Windows of a corpus, read once: iterating gives `Packs` of exactly `packs` packs each.

    They are the packs of `pack_sequential` or `pack_best_fit` over the whole corpus, in order, and
    `samples` are indices in the corpus.  Memory holds a chunk, a window and best fit's buffer.
    """

    def __init__(
        self,
        chunks: Iterable[ArrayLike],
        *,
        tokens: int,
        packs: int,
        packing: Packing = "sequential",
        longer: LongerCut = "drop",
        buffer: int | None = None,
    ) -> None:
        """`chunks` gives integer lengths in tokens; where they are parted changes nothing.

        `tokens` is L and `packs` GBS.  `longer` says what becomes of samples of more than L tokens:
        `refuse` them, `drop` them, or `cut` them: in sequence like any other sample, for best fit
        into pieces of L tokens and a rest, each a sample of its own.  `buffer` is best fit's, in
        samples: 4,096 unless given.

        Raises ValueError for bad arguments; iterating raises it for bad lengths, and for a corpus
        that fills no window.
        """
        if check_count("tokens", tokens) >= MAX_LENGTH:
            raise ValueError(
                f"tokens is {tokens}; L must be less than 2^31, for cu_seqlens are int32"
            )
        check_count("packs", packs)
        for name, value, kinds in (("packing", packing, Packing), ("longer", longer, LongerCut)):
            if value not in get_args(kinds):
                choices = ", ".join(map(repr, get_args(kinds)))
                raise ValueError(f"{name} is {value!r}; choose one of {choices}")
        if buffer is not None and packing != "best-fit":
            raise ValueError(
                f"buffer is {buffer} but packing is {packing!r}; only best-fit has one"
            )
        size = DEFAULT_BUFFER if buffer is None else check_count("buffer", buffer)
        self._chunks = chunks
        self._tokens = tokens
        self._packs = packs
        self._longer = longer
        self._cuts_itself = packing == "sequential"
        self._packer: Packer = (
            SequentialPacker(tokens) if self._cuts_itself else BestFitPacker(tokens, size)
        )
        self._started = False
        bins = len(bin_edges()) - 1
        self._bin_samples = np.zeros(bins, dtype=np.int64)
        self._bin_tokens = np.zeros(bins, dtype=np.int64)
        self._shortest, self._longest = MAX_LENGTH, 0
        self._samples = self._dropped_samples = self._dropped_tokens = self._cut_samples = 0
        self._windows = self._used_tokens = self._padding_tokens = 0

    @property
    def summary(self) -> CorpusSummary:
        """Everything that has been read so far; complete once iterating has ended."""
        tokens = int(self._bin_tokens.sum())
        return CorpusSummary(
            samples=self._samples,
            tokens=tokens,
            median=self._median(),
            mean=tokens / self._samples if self._samples else 0.0,
            longest=self._longest,
            dropped_samples=self._dropped_samples,
            dropped_tokens=self._dropped_tokens,
            cut_samples=self._cut_samples,
            padding_tokens=self._padding_tokens,
            left_over_tokens=tokens - self._dropped_tokens - self._used_tokens,
            windows=self._windows,
            histogram=self._histogram(),
        )

    def _median(self) -> float:
        """Median length, interpolated inside its bin; 0 where there is no sample."""
        if not self._samples:
            return 0.0
        reached = np.cumsum(self._bin_samples)
        i = int(np.searchsorted(reached, self._samples / 2))
        low, high = int(bin_edges()[i]), int(bin_edges()[i + 1]) - 1
        inside = int(self._bin_samples[i])
        before = int(reached[i]) - inside
        value = low + (high - low) * (self._samples / 2 - before) / inside
        return min(max(value, self._shortest), self._longest)

    def _histogram(self) -> LengthBins:
        """Bins from the first that holds a sample to the last."""
        held = np.flatnonzero(self._bin_samples)
        first, stop = (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)
        samples = self._bin_samples[first:stop].tolist()
        tokens = self._bin_tokens[first:stop].tolist()
        return LengthBins(
            edges=tuple(bin_edges()[first : stop + 1].tolist()),
            samples=tuple(samples),
            tokens=tuple(tokens),
            # Lengths of a bin are similar, so their squares sum to tokens^2 / samples.
            squares=tuple(
                float(of_bin) ** 2 / max(count, 1)
                for count, of_bin in zip(samples, tokens, strict=True)
            ),
        )

    def __iter__(self) -> Iterator[Packs]:
        if self._started:
            raise ValueError("a WindowReader reads its corpus once; make another to read it again")
        self._started = True
        return self._read()

    def _read(self) -> Iterator[Packs]:
        held: list[Packs] = []
        for packs in self._packed():
            held.append(packs)
            if sum(map(len, held)) < self._packs:
                continue
            run = _concatenated(held)
            full = len(run) // self._packs * self._packs
            for first in range(0, full, self._packs):
                yield self._counted(_part(run, first, first + self._packs))
            held = [_part(run, full, len(run))]
        if not self._windows:
            raise ValueError(self._why_no_window())

    def _packed(self) -> Iterator[Packs]:
        """Packs as they become full."""
        for chunk in self._chunks:
            packs = self._packer.feed(self._admitted(chunk))
            if packs is not None:
                yield packs
        packs = self._packer.finish()
        if packs is not None:
            yield packs

    def _admitted(self, chunk: ArrayLike) -> Pieces:
        """Check and count a chunk; the pieces to pack."""
        lengths = _checked(chunk, self._samples)
        pieces = Pieces(
            lengths,
            np.arange(self._samples, self._samples + len(lengths)),
            np.zeros(len(lengths), dtype=np.int64),
        )
        too_long = lengths > self._tokens
        count = int(too_long.sum())
        if count and self._longer == "refuse":
            i = int(np.argmax(too_long))
            raise ValueError(
                f"sample {self._samples + i} of the corpus has {lengths[i]} tokens, more than a "
                f"pack of tokens={self._tokens}; choose longer='drop' or longer='cut', or a larger "
                "tokens"
            )
        self._count(lengths)
        if not count:
            return pieces
        if self._longer == "cut":
            self._cut_samples += count
            return pieces if self._cuts_itself else cut_longer(pieces, self._tokens)
        self._dropped_samples += count
        self._dropped_tokens += int(lengths[too_long].sum())
        return pieces[~too_long]

    def _count(self, lengths: IntArray) -> None:
        """Add a chunk to the counts of the corpus."""
        self._samples += len(lengths)
        self._shortest = min(self._shortest, int(lengths.min(initial=MAX_LENGTH)))
        self._longest = max(self._longest, int(lengths.max(initial=0)))
        self._bin_samples += np.histogram(lengths, bin_edges())[0]
        # Sums of whole numbers are exact in floats, below 2^53 tokens a chunk.
        tokens = np.histogram(lengths, bin_edges(), weights=lengths.astype(np.float64))[0]
        self._bin_tokens += np.rint(tokens).astype(np.int64)

    def _counted(self, window: Packs) -> Packs:
        used = int(window.lengths.sum())
        self._windows += 1
        self._used_tokens += used
        self._padding_tokens += self._packs * self._tokens - used
        return window

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
            f"packs={self._packs} packs of tokens={self._tokens}; choose fewer or shorter packs, "
            "or a larger corpus"
        )


def _checked(chunk: ArrayLike, first: int) -> IntArray:
    """Lengths as int64 [samples]; errors count samples through the corpus."""
    array = np.asarray(chunk)
    if array.ndim == 1 and array.dtype.kind in "iu":
        wrong = (array < 1) | (array > MAX_LENGTH)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"sample {first + i} of the corpus has length {array[i]}; a sample has 1 to 2^31 "
                "tokens"
            )
        lengths: IntArray = array.astype(np.int64, copy=False)
        return lengths
    return check_lengths(chunk, name=f"lengths (from sample {first} of the corpus)")


def _part(packs: Packs, first: int, stop: int) -> Packs:
    """Some of the packs; their arrays are views."""
    offsets = packs.offsets[first : stop + 1]
    inside = slice(int(offsets[0]), int(offsets[-1]))
    return Packs(
        tokens=packs.tokens,
        lengths=packs.lengths[inside],
        offsets=offsets - offsets[0],
        samples=packs.samples[inside],
        starts=packs.starts[inside],
    )


def _concatenated(runs: list[Packs]) -> Packs:
    """The packs of all runs, behind each other."""
    if len(runs) == 1:
        return runs[0]
    before = np.cumsum([0, *(len(run.lengths) for run in runs)])
    offsets = [run.offsets[:-1] + shift for run, shift in zip(runs, before, strict=False)]
    return Packs(
        tokens=runs[0].tokens,
        lengths=np.concatenate([run.lengths for run in runs]),
        offsets=np.concatenate([*offsets, before[-1:]]),
        samples=np.concatenate([run.samples for run in runs]),
        starts=np.concatenate([run.starts for run in runs]),
    )
