"""Best-fit packing, compiled.  Imported only by the packer that needs it."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Flags = NDArray[np.bool_]


@numba.njit(cache=True)
def fill_packs(lengths: IntArray, tokens: int, buffer: int, step: int) -> tuple[IntArray, Flags]:
    """All samples in packed order, and whether each opens a pack; [samples].

    A pack opens with the oldest sample of the buffer and takes the longest that fits until none
    does; the buffer is filled up whenever `step` samples of it are used.  The longest that fits is
    found by bisection, then by union-find over the samples gone: `below[i]` leads to the longest
    of the i shortest that is still there.
    """
    n = len(lengths)
    order = np.empty(n, dtype=np.int64)
    opens = np.zeros(n, dtype=np.bool_)
    waiting = np.empty(0, dtype=np.int64)  # samples in order of arrival
    by_length = np.empty(0, dtype=np.int64)  # their places in `waiting`, see _fill_up
    gone = np.zeros(0, dtype=np.bool_)
    ascending, rank, below = waiting, waiting, waiting
    cursor, left, oldest, room = 0, 0, 0, -1
    for count in range(n):
        if cursor < n and left <= buffer - step:
            more = min(buffer - left, n - cursor)
            fresh = lengths[cursor : cursor + more]
            by_length, ascending = _fill_up(fresh, by_length, ascending, gone)
            waiting = np.concatenate((waiting[~gone], np.arange(cursor, cursor + more)))
            cursor += more
            left += more
            gone = np.zeros(left, dtype=np.bool_)
            rank = np.empty(left, dtype=np.int64)
            rank[by_length] = np.arange(left)
            below = np.arange(left + 1)
            oldest = 0
        root = 0
        if room > 0:
            root = int(np.searchsorted(ascending, room, side="right"))
            while below[root] != root:
                below[root] = below[below[root]]  # halve the path
                root = below[root]
        if root > 0:
            place = by_length[root - 1]
        else:
            while gone[oldest]:
                oldest += 1
            place = oldest
            opens[count] = True
            room = tokens
        order[count] = waiting[place]
        room -= lengths[waiting[place]]
        gone[place] = True
        left -= 1
        below[rank[place] + 1] = rank[place]
    return order, opens


@numba.njit(cache=True)
def _fill_up(
    fresh: IntArray,
    by_length: IntArray,
    ascending: IntArray,
    gone: Flags,
) -> tuple[IntArray, IntArray]:
    """The buffer's order without what is gone and with samples of the lengths `fresh` behind it.

    `by_length` lists places in the buffer by ascending length, `ascending` the lengths themselves;
    the oldest of equals comes last.
    """
    place = np.cumsum(~gone) - 1
    kept = len(gone) - gone.sum()
    last = len(fresh) - 1
    youngest_first = last - np.argsort(fresh[::-1], kind="mergesort")
    order = np.empty(kept + len(fresh), dtype=np.int64)
    sizes = np.empty(kept + len(fresh), dtype=np.int64)
    at, new = 0, 0
    for i in range(len(by_length)):
        if gone[by_length[i]]:
            continue
        while new <= last and fresh[youngest_first[new]] <= ascending[i]:
            order[at] = kept + youngest_first[new]
            sizes[at] = fresh[youngest_first[new]]
            at += 1
            new += 1
        order[at] = place[by_length[i]]
        sizes[at] = ascending[i]
        at += 1
    order[at:] = kept + youngest_first[new:]
    sizes[at:] = fresh[youngest_first[new:]]
    return order, sizes
