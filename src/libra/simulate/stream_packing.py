"""Packing a corpus as a stream: the packs of `libra.data.packing`, as soon as they are full.

A packer takes samples in order and returns whole packs.  It holds no more than the next pack needs:
less than a pack of tokens in sequence, a buffer of samples and the open pack in best fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from libra.data.packing import Packs, pack_sequential

IntArray = NDArray[np.int64]
Packing = Literal["sequential", "best-fit"]

DEFAULT_BUFFER: Final = 4096
"""Samples that best-fit packing chooses from, as in `libra.data.packing.pack_best_fit`."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Samples, or what packing needs of them, in order; each array [pieces]."""

    lengths: IntArray
    samples: IntArray
    """Index in the corpus."""
    starts: IntArray
    """First token in its sample."""

    def __getitem__(self, which: slice | IntArray | NDArray[np.bool_]) -> Pieces:
        return Pieces(self.lengths[which], self.samples[which], self.starts[which])


def concat_pieces(parts: list[Pieces]) -> Pieces:
    """`parts` behind each other."""
    if len(parts) == 1:
        return parts[0]
    return Pieces(
        np.concatenate([p.lengths for p in parts]),
        np.concatenate([p.samples for p in parts]),
        np.concatenate([p.starts for p in parts]),
    )


def no_pieces() -> Pieces:
    return Pieces(*np.empty((3, 0), dtype=np.int64))


def cut_longer(pieces: Pieces, tokens: int) -> Pieces:
    """Pieces of more than `tokens` as pieces of `tokens` and a rest."""
    counts = -(-pieces.lengths // tokens)
    if counts.max(initial=1) == 1:
        return pieces
    whole = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * tokens
    cut = pieces[whole]
    return Pieces(np.minimum(cut.lengths - offsets, tokens), cut.samples, cut.starts + offsets)


class Packer(Protocol):
    """Makes packs of a stream."""

    def feed(self, pieces: Pieces) -> Packs | None:
        """Take pieces; the packs that they complete."""

    def finish(self) -> Packs | None:
        """The packs that only the stream's end completes."""


class SequentialPacker:
    """`pack_sequential` in pieces; the last, incomplete pack is never given."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._waiting: list[Pieces] = []
        self._held = 0

    def feed(self, pieces: Pieces) -> Packs | None:
        self._waiting.append(pieces)
        self._held += int(pieces.lengths.sum())
        if self._held < self._tokens:
            return None
        waiting = concat_pieces(self._waiting)
        packs = pack_sequential(waiting.lengths, self._tokens, longer="cut")
        used = len(packs) * self._tokens
        self._waiting = [_after(waiting, used)]
        self._held -= used
        return Packs(
            tokens=self._tokens,
            lengths=packs.lengths,
            offsets=packs.offsets,
            samples=waiting.samples[packs.samples],
            starts=packs.starts + waiting.starts[packs.samples],
        )

    def finish(self) -> Packs | None:
        return None


def _after(pieces: Pieces, tokens: int) -> Pieces:
    """What is left of the pieces behind their first `tokens` tokens."""
    ends = np.cumsum(pieces.lengths)
    first = int(np.searchsorted(ends, tokens, side="right"))
    rest = pieces[first:]
    if not len(rest.lengths):
        return rest
    gone = tokens - (int(ends[first]) - int(rest.lengths[0]))
    cut = np.zeros_like(rest.lengths)
    cut[0] = gone
    return Pieces(rest.lengths - cut, rest.samples.copy(), rest.starts + cut)


class BestFitPacker:
    """`pack_best_fit` in pieces."""

    def __init__(self, tokens: int, buffer: int) -> None:
        self._tokens = tokens
        self._buffer = buffer
        self._waiting: list[Pieces] = []
        self._held = 0
        self._open = no_pieces()
        self._room = -1

    def feed(self, pieces: Pieces) -> Packs | None:
        self._waiting.append(pieces)
        self._held += len(pieces.lengths)
        return self._fill(last=False) if self._held >= self._buffer else None

    def finish(self) -> Packs | None:
        return self._fill(last=True)

    def _fill(self, *, last: bool) -> Packs | None:
        from libra.data.packing_kernels import fill_packs  # numba: loaded by those who need it

        waiting = concat_pieces([no_pieces(), *self._waiting])
        step = max(1, self._buffer // 16)
        order, opens, self._room = fill_packs(
            waiting.lengths, self._tokens, self._buffer, step, self._room, last
        )
        stays = np.ones(len(waiting.lengths), dtype=bool)
        stays[order] = False
        self._waiting = [waiting[stays]]
        self._held -= len(order)
        packed = concat_pieces([self._open, waiting[order]])
        firsts = np.flatnonzero(opens) + len(self._open.lengths)
        if len(self._open.lengths):
            firsts = np.append(0, firsts)
        if last:
            firsts = np.append(firsts, len(packed.lengths))
        if not len(firsts):
            return None
        end = int(firsts[-1])
        self._open = packed[end:]
        done = packed[:end]
        return Packs(
            tokens=self._tokens,
            lengths=done.lengths,
            offsets=firsts,
            samples=done.samples,
            starts=done.starts,
        )
