"""Libra's placement: everything stays at home but the surplus of the workers above the target.

    rows of a long sample ^  d d d . . .     columns are key/value head groups of one sample
                          |  d d b . . .     a worker keeps whole columns up to its target (.) and
                          gives the others away |  a c b . . .     far workers take runs of rows (a,
                          b, c, d), top rows first: late rows hold |  . . . . . .     the most pairs
                          for each row that must travel, and one prefix serves a run
                             columns ->

Pieces are cut at any row and head group, so the balance depends on neither B nor H.  Traffic of a
piece that ends at row b of its sample is b rows of K and V and its own rows of Q and O.  The
workers with the largest room take the highest rows, where long runs pay best; those with little
room are left alone.
"""

from __future__ import annotations

import heapq
import math

import numba
import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape
from libra.plan.geometry import Geometry, with_cuts

IntArray = NDArray[np.int64]


def column_count(heads: HeadShape, head_shards: int, chunks: int) -> int:
    """Head columns that pieces are cut from: the finest multiple of H that splits no key/value head
    and M can still cut.
    """
    fits = [
        n
        for n in range(head_shards, heads.kv + 1, head_shards)
        if heads.kv % n == 0 and heads.q // n % chunks == 0
    ]
    return max(fits, default=head_shards)


def place_surplus(
    geometry: Geometry, heads: HeadShape, columns: int, tolerance: float
) -> tuple[Geometry, NDArray[np.int32]]:
    """The geometry with its blocks cut where pieces end, and the worker of each tile, int32 [blocks
    * columns].
    """
    pieces = geometry.holdings
    origin = geometry.sample_start[pieces.first]
    low, high = pieces.start - origin, pieces.stop - origin
    worker = geometry.fragment_worker[pieces.second]
    order = np.lexsort((-(low + high), worker))  # a worker gives its latest rows first
    moved = _move_surplus(
        worker[order],
        pieces.first[order],
        low[order],
        high[order],
        geometry.workers,
        columns,
        heads.q // columns,
        tolerance,
        row_step(geometry.tokens),
    )
    sample, column, low, high, taker = moved.T
    start, stop = geometry.sample_start[sample] + low, geometry.sample_start[sample] + high
    ends = stop[stop < geometry.tokens * geometry.packs]  # no block starts where the pool ends
    cut = with_cuts(geometry, np.unique(np.concatenate([geometry.fragment_start, start, ends])))
    tiles = np.repeat(cut.block_worker, columns).reshape(-1, columns).astype(np.int32)
    first, last = np.searchsorted(cut.block_start, start), np.searchsorted(cut.block_start, stop)
    for i in range(len(sample)):
        tiles[first[i] : last[i], column[i]] = taker[i]
    return cut, tiles.ravel()


def row_step(tokens: int) -> int:
    """Rows to which pieces are cut: a power of two, at most 128, at most L / 1024."""
    return 1 << min(7, max(0, (tokens // 1024).bit_length() - 1))


@numba.njit(cache=True)
def _pairs(stop: int) -> int:
    return stop * (stop + 1) // 2


@numba.njit(cache=True)
def _row_below(pairs: float) -> int:
    """Largest row r with r (r + 1) / 2 <= pairs."""
    row = int((math.sqrt(8.0 * max(pairs, 0.0) + 1.0) - 1.0) / 2.0)
    while _pairs(row) > pairs and row > 0:
        row -= 1
    return row


@numba.njit(cache=True)
def _move_surplus(
    worker: IntArray,
    sample: IntArray,
    low: IntArray,
    high: IntArray,
    workers: int,
    columns: int,
    width: int,
    tolerance: float,
    step: int,
) -> IntArray:
    """Moved pieces, int64 [pieces, 5]: sample, column, first row, one past the last row, new
    worker.
    """
    load = np.zeros(workers, dtype=np.int64)
    for i in range(len(worker)):
        load[worker[i]] += (_pairs(high[i]) - _pairs(low[i])) * width * columns
    target = (1.0 + tolerance) * load.sum() / workers

    # What each worker above the target gives away: whole columns, then the late rows of one more.
    given = [(0, 0, 0, 0) for _ in range(0)]
    for i in range(len(worker)):
        surplus = load[worker[i]] - target
        work = (_pairs(high[i]) - _pairs(low[i])) * width
        if surplus <= 0:
            continue
        whole = min(columns, int(surplus // work))
        for column in range(whole):
            given.append((sample[i], column, low[i], high[i]))
        load[worker[i]] -= whole * work
        surplus -= whole * work
        if whole < columns and surplus > 0:
            row = _row_below(_pairs(high[i]) - surplus / width) // step * step
            row = max(row, low[i])
            given.append((sample[i], whole, row, high[i]))
            load[worker[i]] -= (_pairs(high[i]) - _pairs(row)) * width
    given.sort()

    # Stacks of given rows, one a sample and column; the highest row is taken first.
    heap = [(0, 0, 0) for _ in range(0)]
    begin = 0
    for i in range(len(given)):
        if i + 1 == len(given) or given[i + 1][0] != given[i][0] or given[i + 1][1] != given[i][1]:
            heap.append((-given[i][3], begin, i))
            begin = i + 1
    heapq.heapify(heap)

    room = [(0.0, 0) for _ in range(0)]
    for taker in range(workers):
        if load[taker] < target:
            room.append((load[taker] - target, taker))
    room.sort()
    moved = [(0, 0, 0, 0, 0) for _ in range(0)]
    for negative, taker in room:
        free = -negative
        while len(heap) > 0 and free > 0:
            top, begin, i = heapq.heappop(heap)
            to_row = -top
            while i >= begin and free > 0:  # down one stack: its prefix serves all these rows
                of_sample, column, from_row, _ = given[i]
                work = (_pairs(to_row) - _pairs(from_row)) * width
                if work > free:
                    row = -(-(_row_below(_pairs(to_row) - free / width) + 1) // step) * step
                    if row < to_row:
                        moved.append((of_sample, column, row, to_row, taker))
                        to_row = row
                    free = 0.0
                else:
                    moved.append((of_sample, column, from_row, to_row, taker))
                    free -= work
                    i -= 1
                    to_row = given[i][3] if i >= begin else 0
            if i >= begin:
                heapq.heappush(heap, (-to_row, begin, i))
    pieces = np.empty((len(moved), 5), dtype=np.int64)
    for i in range(len(moved)):
        pieces[i, 0], pieces[i, 1], pieces[i, 2], pieces[i, 3], pieces[i, 4] = moved[i]
    return pieces
