"""Packing a corpus as a stream: the packs of `libra.data.packing`, as soon as they are full.

A packer takes a stream of samples and yields whole packs.  It holds no more than the next pack
needs: less than a pack of tokens in sequence, a buffer of samples and the open pack in best fit.

    samples (rows of Pieces)     5 7 4 6 2        packs of 8 tokens, in sequence
    pieces of whole packs        5 3 | 4 4 |      held for the next pack: 6 2
    fragments of each pack       2     2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from libra.data.packing import pack_sequential

IntArray = NDArray[np.int64]
Packing = Literal["sequential", "best-fit"]

Pieces = IntArray
"""Samples or pieces of them, int64 [3, pieces]: tokens, index in the corpus, and first token in the
sample.
"""
Run = tuple[Pieces, IntArray]
"""Whole packs behind each other: their pieces [3, pieces], and pieces of each pack [packs].
"""

DEFAULT_BUFFER: Final = 4096
"""Samples that best-fit packing chooses from, as in `libra.data.packing.pack_best_fit`."""

_LENGTH, _SAMPLE, _START = range(3)


def whole_samples(lengths: IntArray, first: int) -> Pieces:
    """Samples `first`, `first` + 1, ... of the corpus as pieces."""
    return np.stack([lengths, first + np.arange(len(lengths)), np.zeros_like(lengths)])


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


def stream_sequential(stream: Iterable[Pieces], tokens: int) -> Iterator[Run]:
    """`pack_sequential` in runs; the last, incomplete pack never comes."""
    waiting: list[Pieces] = []
    held = 0
    for pieces in stream:
        waiting.append(pieces)
        held += int(pieces[_LENGTH].sum())
        if held < tokens:
            continue
        joined = np.concatenate(waiting, axis=1)
        packs = pack_sequential(joined[_LENGTH], tokens, longer="cut")
        packed = joined[:, packs.samples]
        packed[_LENGTH] = packs.lengths
        packed[_START] += packs.starts
        yield packed, np.diff(packs.offsets)
        used = len(packs) * tokens
        waiting = [_without_first(joined, used)]
        held -= used


def _without_first(pieces: Pieces, tokens: int) -> Pieces:
    """The pieces behind the first `tokens` tokens; the first of them may be cut."""
    ends = np.cumsum(pieces[_LENGTH])
    first = int(np.searchsorted(ends, tokens, side="right"))
    rest = pieces[:, first:].copy()
    if rest.size:
        cut = tokens - (int(ends[first]) - int(rest[_LENGTH, 0]))
        rest[_LENGTH, 0] -= cut
        rest[_START, 0] += cut
    return rest


def stream_best_fit(stream: Iterable[Pieces], tokens: int, buffer: int) -> Iterator[Run]:
    """`pack_best_fit` in runs; the end of the stream completes the last ones."""
    from libra.data.packing_kernels import fill_packs  # numba: half a second to import

    nothing = np.empty((3, 0), dtype=np.int64)
    waiting: list[Pieces] = []
    opened, room = nothing, -1  # pieces of the open pack, and its free tokens
    for pieces, last in _with_end(stream, nothing):
        waiting.append(pieces)
        if not last and sum(each.shape[1] for each in waiting) < buffer:
            continue
        # Step 1: fill packs from the waiting samples, and keep the rest.
        joined = np.concatenate(waiting, axis=1)
        step = max(1, buffer // 16)
        order, opens, room = fill_packs(joined[_LENGTH], tokens, buffer, step, room, last)
        stays = np.ones(joined.shape[1], dtype=np.bool_)
        stays[order] = False
        waiting = [joined[:, stays]]
        # Step 2: find the first piece of every pack; the last pack is open until the end.
        packed = np.concatenate([opened, joined[:, order]], axis=1)
        firsts = np.flatnonzero(opens) + opened.shape[1]
        if opened.size:
            firsts = np.append(0, firsts)
        if last:
            firsts = np.append(firsts, packed.shape[1])
        opened = packed
        if len(firsts):
            opened = packed[:, firsts[-1] :]
            yield packed[:, : firsts[-1]], np.diff(firsts)


def _with_end(stream: Iterable[Pieces], end: Pieces) -> Iterator[tuple[Pieces, bool]]:
    """The stream, then `end`, and whether it is that."""
    for pieces in stream:
        yield pieces, False
    yield end, True
