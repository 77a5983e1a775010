"""Packing a corpus as a stream: the packs of `libra.data.packing`, as soon as they are full.

A packer takes a stream of samples and yields whole packs.  It holds no more than the next pack
needs: less than a pack of tokens in sequence, a buffer of samples and the open pack in best fit.

    samples (rows of Pieces)     5 7 4 6 2      packs of 8 tokens, in sequence
    pieces of whole packs        5 3 4 4        held for the next pack: 6 2
    which of them open a pack    1 0 1 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from libra.data.packing import pack_sequential

IntArray = NDArray[np.int64]
Packing = Literal["sequential", "best-fit"]

Pieces = IntArray
"""Samples or pieces of them, int64 [4, pieces]: tokens, index in the corpus, first token in the
sample, and 1 for the first piece of a pack, else 0.
"""

DEFAULT_BUFFER: Final = 4096
"""Samples that best-fit packing chooses from, as in `libra.data.packing.pack_best_fit`."""

_LENGTH, _SAMPLE, _START, OPENS = range(4)
NOTHING: Final[Pieces] = np.empty((4, 0), dtype=np.int64)
"""No piece."""


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
    opened = NOTHING  # pieces of the open pack
    for pieces in stream:
        joined = np.concatenate([opened, pieces], axis=1)
        if not joined.size:
            continue
        packs = pack_sequential(joined[_LENGTH], tokens, longer="cut", drop_last=False)
        packed = joined[:, packs.samples]
        packed[_LENGTH] = packs.lengths
        packed[_START] += packs.starts
        packed[OPENS] = 0
        packed[OPENS, packs.offsets[:-1]] = 1
        full = np.count_nonzero(packs.padding == 0)  # all packs, or all but the last
        end = int(packs.offsets[full])
        yield packed[:, :end]
        opened = packed[:, end:]


def stream_best_fit(stream: Iterable[Pieces], tokens: int, buffer: int) -> Iterator[Pieces]:
    """The pieces of whole packs as of `pack_best_fit`; the end of the stream completes the last."""
    from libra.data.packing_kernels import fill_packs  # numba: half a second to import

    waiting: list[Pieces] = []
    opened, room = NOTHING, -1  # pieces of the open pack, and its free tokens
    for pieces in chain(stream, [None]):
        last = pieces is None
        waiting.append(NOTHING if pieces is None else pieces)
        if not last and sum(each.shape[1] for each in waiting) < buffer:
            continue
        # Step 1: fill packs from the waiting samples, and keep the rest.
        joined = np.concatenate(waiting, axis=1)
        step = max(1, buffer // 16)
        order, opens, room = fill_packs(joined[_LENGTH], tokens, buffer, step, room, last)
        waiting = [np.delete(joined, order, axis=1)]
        # Step 2: part the whole packs from the open one, the last until the end of the stream.
        packed = np.concatenate([opened, joined[:, order]], axis=1)
        packed[OPENS, opened.shape[1] :] = opens
        firsts = np.flatnonzero(packed[OPENS])
        end = packed.shape[1] if last or not len(firsts) else int(firsts[-1])
        yield packed[:, :end]
        opened = packed[:, end:]
