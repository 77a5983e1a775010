"""Best-fit packing, compiled.  Imported only by the packers that need it."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Flags = NDArray[np.bool_]


@numba.njit(cache=True)
def fill_packs(
    lengths: IntArray, tokens: int, buffer: int, step: int, room: int = -1, last: bool = True
) -> tuple[IntArray, Flags, int]:
    """Samples in packed order, whether each opens a pack, [packed], and the room of the last pack.

    A pack opens with the oldest sample of the buffer and takes the longest that fits until none
    does; the buffer is filled up whenever `step` samples of it are used.  The longest that fits is
    found by bisection, then by union-find over the samples gone: `below[i]` leads to the longest
    of the i shortest that is still there.

    All samples are packed, unless more are to come after these (`last` False): then packing stops
    where the buffer cannot be filled up.  To go on, give the samples left, in order, the next ones
    behind them, and the `room` of the pack that is open (-1 where none is).
    """
    n = len(lengths)
    order = np.empty(n, dtype=np.int64)
    opens = np.zeros(n, dtype=np.bool_)
    gone = np.zeros(n, dtype=np.bool_)
    most = min(buffer, n)
    ids, sizes, below = _no_samples(most)  # the buffer by length, see _fill_up
    new_ids, new_sizes, _ = _no_samples(most)
    # `held` samples were in the buffer when it was filled up; the open pack takes none but of the
    # `top` shortest, for its room only shrinks.
    count, cursor, held, top, oldest = 0, 0, 0, 0, 0
    while count < n:
        left = cursor - count
        if left <= buffer - step and (cursor < n or not last):
            more = min(buffer - left, n - cursor)
            if not last and more < buffer - left:
                break
            _fill_up(lengths, cursor, more, (ids, sizes), (new_ids, new_sizes), below, held)
            ids, new_ids = new_ids, ids
            sizes, new_sizes = new_sizes, sizes
            cursor += more
            held = top = left + more
        if top > 0 and sizes[top - 1] > room:
            top = int(np.searchsorted(sizes[:top], room, side="right"))
        while below[top] != top:
            below[top] = below[below[top]]  # halve the path
            top = below[top]
        place = top - 1
        if place < 0:
            while gone[oldest]:
                oldest += 1
            place = _place_of(oldest, lengths[oldest], ids, sizes[:held])
            opens[count] = True
            room = tokens
            top = held
        order[count] = ids[place]
        count += 1
        gone[ids[place]] = True
        room -= sizes[place]
        below[place + 1] = place
    return order[:count], opens[:count], room


@numba.njit(cache=True)
def _no_samples(most: int) -> tuple[IntArray, IntArray, IntArray]:
    return (
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.zeros(most + 1, dtype=np.int64),
    )


@numba.njit(cache=True)
def _fill_up(
    lengths: IntArray,
    cursor: int,
    more: int,
    old: tuple[IntArray, IntArray],
    new: tuple[IntArray, IntArray],
    below: IntArray,
    held: int,
) -> None:
    """Write the buffer without what is gone and with the samples from `cursor` on into `new`.

    The buffer lists samples and their lengths by ascending length, the oldest of equals last;
    `below` tells what is gone, and is reset.
    """
    ids, sizes = old
    new_ids, new_sizes = new
    youngest_first = lengths[cursor : cursor + more][::-1]
    ascending = np.argsort(youngest_first, kind="mergesort")
    at, fresh = 0, 0
    for i in range(held):
        if below[i + 1] != i + 1:
            continue
        size = sizes[i]
        while fresh < more and youngest_first[ascending[fresh]] <= size:
            new_sizes[at] = youngest_first[ascending[fresh]]
            new_ids[at] = cursor + more - 1 - ascending[fresh]
            at += 1
            fresh += 1
        new_sizes[at] = size
        new_ids[at] = ids[i]
        at += 1
    for j in range(fresh, more):
        new_sizes[at] = youngest_first[ascending[j]]
        new_ids[at] = cursor + more - 1 - ascending[j]
        at += 1
    for i in range(at + 1):
        below[i] = i


@numba.njit(cache=True)
def _place_of(sample: int, length: int, ids: IntArray, sizes: IntArray) -> int:
    """Where a sample lies in the buffer, by bisection."""
    first, stop = 0, len(sizes)
    while stop - first > 1:
        middle = (first + stop) // 2
        if sizes[middle] < length or (sizes[middle] == length and ids[middle] >= sample):
            first = middle
        else:
            stop = middle
    return first
