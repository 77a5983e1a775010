"""Best-fit packing, compiled.  Imported only by the packers that need it."""

from __future__ import annotations

from typing import Final

import numba
import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import IntArray

Flags = NDArray[np.bool_]

# A waiting sample is one integer, its key: the length in the upper 32 bits, and below them a
# number that falls as the sample's index rises.  So ascending keys list samples by ascending
# length, the oldest of equal length last.
_ID_BITS: Final = 32
_ID_MASK: Final = (1 << _ID_BITS) - 1


@numba.njit(cache=True)
def fill_packs(
    lengths: IntArray, tokens: int, buffer: int, step: int, room: int = -1, last: bool = True
) -> tuple[IntArray, Flags, int]:
    """Samples in packed order, whether each opens a pack, [packed], and the last pack's free room.

    A pack opens with the oldest sample of the buffer and takes the longest that fits until none
    does; the buffer is filled up whenever `step` samples of it are used.  The longest that fits is
    found by bisection, then by union-find over the used samples: `below[i]` leads to the longest
    unused one of the i shortest.

    `lengths` are in [1, `tokens`], `tokens` < 2^31, fewer than 2^32 samples.  All samples are
    packed, unless `last` is False because more are to come: then packing stops where the buffer
    cannot be filled up.  To go on, pass the unused samples, in order, with the next ones behind
    them, and the `room` of the open pack (-1 where none is open).
    """
    n = len(lengths)
    order = np.empty(n, dtype=np.int64)
    opens = np.zeros(n, dtype=np.bool_)
    used = np.zeros(n, dtype=np.bool_)
    keys = np.empty(0, dtype=np.int64)
    below = np.zeros(1, dtype=np.int64)
    # `cursor` samples have entered the buffer, `count` of them are packed.  The open pack looks
    # among the `top` shortest only: its room shrinks, so longer ones never fit again.
    count, cursor, top, oldest = 0, 0, 0, 0
    while count < n:
        # Step 1: fill up the buffer.
        waiting = cursor - count
        if waiting <= buffer - step and (cursor < n or not last):
            more = min(buffer - waiting, n - cursor)
            if not last and more < buffer - waiting:
                break
            keys = _merge(keys[below[1:] == np.arange(1, len(below))], lengths, cursor, more)
            below = np.arange(len(keys) + 1)
            cursor += more
            top = len(keys)
        # Step 2: the longest unused sample that fits into the open pack.
        if top > 0 and keys[top - 1] >> _ID_BITS > room:
            top = int(np.searchsorted(keys[:top], (room + 1) << _ID_BITS))
        top = _longest_unused(below, top)
        place = top - 1
        # Step 3: where none fits, the oldest unused sample opens a pack.
        if place < 0:
            while used[oldest]:
                oldest += 1
            # Used samples of the same length may be older and lie behind it.
            same_or_shorter = np.searchsorted(keys, (lengths[oldest] + 1) << _ID_BITS)
            place = _longest_unused(below, int(same_or_shorter)) - 1
            opens[count] = True
            room = tokens
            top = len(keys)
        # Step 4: pack it.
        sample = _ID_MASK - (keys[place] & _ID_MASK)
        order[count] = sample
        count += 1
        used[sample] = True
        room -= lengths[sample]
        below[place + 1] = place
    return order[:count], opens[:count], room


@numba.njit(cache=True)
def _merge(waiting: IntArray, lengths: IntArray, first: int, count: int) -> IntArray:
    """Keys in the buffer with those of `count` samples from index `first` on, ascending."""
    fresh = np.empty(count, dtype=np.int64)
    for i in range(count):
        fresh[i] = lengths[first + i] << _ID_BITS | (_ID_MASK - first - i)
    fresh.sort()
    merged = np.empty(len(waiting) + count, dtype=np.int64)
    j = 0
    for i in range(len(merged)):
        if j < count and (i - j == len(waiting) or fresh[j] < waiting[i - j]):
            merged[i] = fresh[j]
            j += 1
        else:
            merged[i] = waiting[i - j]
    return merged


@numba.njit(cache=True)
def _longest_unused(below: IntArray, top: int) -> int:
    """1 + place of the longest unused of the `top` shortest samples; 0 where all are used."""
    while below[top] != top:
        below[top] = below[below[top]]  # halve the path
        top = below[top]
    return top
