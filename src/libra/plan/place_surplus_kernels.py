"""The compiled part of the surplus placement: what each worker gives away, and who takes it."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Fragments(NamedTuple):
    """What each worker holds of each sample, rows [low, high), ordered by sample, then row."""

    begin: IntArray
    """First fragment of each sample, then their number, [samples + 1]."""
    low: IntArray
    high: IntArray
    worker: IntArray


class Loads(NamedTuple):
    """The balance of work, in query-key pairs times heads."""

    load: IntArray
    """Of each worker, [workers]; updated as work moves."""
    target: FloatArray
    width: int
    """Query heads of a column."""
    step: int
    """Overlaps are cut at multiples of so many rows."""


class Books(NamedTuple):
    """The balance of bytes, as they lie in the tensors."""

    moved: IntArray
    """What each worker sends, receives and holds for work away from home, [3, workers]; updated
    likewise.
    """
    limits: IntArray
    """Most of each that a worker may come to, [3]."""
    q_row: int
    """Q of one row and column."""
    o_row: int
    kv_row: int
    """K and V of one row and column."""


@numba.njit(cache=True)
def pairs_below(stop: int) -> int:
    """Query-key pairs of a sample's first `stop` rows."""
    return stop * (stop + 1) // 2


@numba.njit(cache=True)
def row_below(pairs: float) -> int:
    """Largest row r with r (r + 1) / 2 <= pairs."""
    row = int((math.sqrt(8.0 * max(pairs, 0.0) + 1.0) - 1.0) / 2.0)
    while pairs_below(row) > pairs and row > 0:
        row -= 1
    return row


@numba.njit(cache=True)
def move_surplus(
    fragments: Fragments,
    latest_first: IntArray,
    columns: int,
    loads: Loads,
    books: Books,
    node: IntArray,
    node_local_first: bool,
) -> IntArray:
    """Moved pieces, int64 [pieces, 5]: sample, column, first row, one past the last row, taker.

    `latest_first` orders fragments by worker, then latest row first: the order in which a worker
    gives.  `node` [workers] ascends from 0; with `node_local_first` the workers of a node take each
    other's surplus before those of others do.
    """
    given = _give(fragments, latest_first, columns, loads)
    taken = [(0, 0, 0, 0, 0) for _ in range(0)]
    nodes = int(node.max()) + 1
    if node_local_first and 1 < nodes < len(node):
        for near in range(nodes):
            _hand_out(given, taken, fragments, loads, books, node, near, False)
    _hand_out(given, taken, fragments, loads, books, node, -1, False)
    if (given[:, 3] > given[:, 2]).any():
        _hand_out(given, taken, fragments, loads, books, node, -1, True)
    return _table(taken)


@numba.njit(cache=True)
def _table(rows: list[tuple[int, int, int, int, int]]) -> IntArray:
    table = np.empty((len(rows), 5), dtype=np.int64)
    for i in range(len(rows)):
        table[i, 0], table[i, 1], table[i, 2], table[i, 3], table[i, 4] = rows[i]
    return table


@numba.njit(cache=True)
def _give(fragments: Fragments, latest_first: IntArray, columns: int, loads: Loads) -> IntArray:
    """What workers above their target give away: whole columns, then the late rows of one more.

    int64 [pieces, 5]: sample, column, first row, one past the last row, fragment; ordered.
    """
    begin, low, high, worker = fragments
    load, target, width, step = loads
    sample = np.empty(len(low), dtype=np.int64)
    for s in range(len(begin) - 1):
        sample[begin[s] : begin[s + 1]] = s
    given = [(0, 0, 0, 0, 0) for _ in range(0)]
    for i in latest_first:
        home = worker[i]
        surplus = load[home] - target[home]
        work = (pairs_below(high[i]) - pairs_below(low[i])) * width
        if surplus <= 0:
            continue
        whole = min(columns, int(surplus // work))
        for column in range(whole):
            given.append((sample[i], column, low[i], high[i], i))
        load[home] -= whole * work
        surplus -= whole * work
        if whole < columns and surplus > 0:
            row = row_below(pairs_below(high[i]) - surplus / width) // step * step
            row = max(row, low[i])
            given.append((sample[i], whole, row, high[i], i))
            load[home] -= (pairs_below(high[i]) - pairs_below(row)) * width
    given.sort()
    return _table(given)


@numba.njit(cache=True)
def _hand_out(
    given: IntArray,
    taken: list[tuple[int, int, int, int, int]],
    fragments: Fragments,
    loads: Loads,
    books: Books,
    node: IntArray,
    near: int,
    scraps: bool,
) -> None:
    """Workers below their target take from the stacks, the emptiest first; those of node `near`
    among themselves, or -1 for all.

    A stack is what is given of one sample and column; its highest row is taken first.  With
    `scraps` a taker whose room is less than a stack's next row looks through the others.
    """
    worker = fragments.worker
    load, target, width, step = loads
    moved, limits, q_row, o_row, _ = books
    pick = [i for i in range(len(given)) if given[i, 3] > given[i, 2]]
    if near >= 0:
        pick = [i for i in pick if node[worker[given[i, 4]]] == near]
    heap = _stacks(given, pick)

    gave = np.zeros(len(load), dtype=np.bool_)  # these may have room for less than a row step
    gave[worker[given[:, 4]]] = True
    room = [(0.0, 0) for _ in range(0)]
    for taker in range(len(load)):
        if load[taker] < target[taker] and (near < 0 or node[taker] == near):
            room.append((load[taker] - target[taker], taker))
    room.sort()
    for negative, taker in room:
        free = -negative
        passed = [(0, 0, 0) for _ in range(0)]  # stacks that the limits keep from this taker
        while len(heap) > 0 and free > 0:
            top, first, n = heapq.heappop(heap)
            sample, column, prefix = given[pick[n], 0], given[pick[n], 1], -top
            fits = _fetch(sample, prefix, taker, gave[taker], fragments, books, 1)
            idle = fits
            while fits and n >= first and free > 0:  # one prefix serves all these rows
                i = pick[n]
                from_row, to_row, home = given[i, 2], given[i, 3], worker[given[i, 4]]
                row = from_row
                full = (pairs_below(to_row) - pairs_below(from_row)) * width > free
                if full:
                    row = row_below(pairs_below(to_row) - free / width) + 1
                by_home = to_row - min(
                    (limits[0] - moved[0, home]) // q_row, (limits[1] - moved[1, home]) // o_row
                )
                by_taker = to_row - min(
                    (limits[0] - moved[0, taker]) // o_row,
                    (limits[1] - moved[1, taker]) // q_row,
                    (limits[2] - moved[2, taker]) // (q_row + o_row),
                )
                stuck = by_home > row  # no one can take the rest of this piece
                fits = by_taker <= max(row, by_home)
                row = max(row, by_home, by_taker)
                if row > from_row:
                    row = -(-row // step) * step
                if row < to_row:
                    rows = to_row - row
                    work = (pairs_below(to_row) - pairs_below(row)) * width
                    taken.append((sample, column, row, to_row, taker))
                    given[i, 3] = row
                    free -= work
                    load[taker] += work
                    moved[0, home] += rows * q_row
                    moved[1, home] += rows * o_row
                    moved[0, taker] += rows * o_row
                    moved[1, taker] += rows * q_row
                    moved[2, taker] += rows * (q_row + o_row)
                    idle = False
                if row <= from_row or (stuck and fits):
                    n -= 1
                elif full and scraps:
                    fits = False
                elif full:
                    free = 0.0
            if idle:
                _fetch(sample, prefix, taker, gave[taker], fragments, books, -1)
            if n >= first:
                rest = (-given[pick[n], 3], first, n)
                if free > 0:
                    passed.append(rest)
                else:
                    heapq.heappush(heap, rest)
        for stack in passed:
            heapq.heappush(heap, stack)


@numba.njit(cache=True)
def _stacks(given: IntArray, pick: list[int]) -> list[tuple[int, int, int]]:
    """A heap of (-highest row, first, last): the runs of `pick` with one sample and column."""
    heap = [(0, 0, 0) for _ in range(0)]
    first = 0
    for n in range(len(pick)):
        ends = n + 1 == len(pick)
        if not ends:
            here, after = given[pick[n]], given[pick[n + 1]]
            ends = here[0] != after[0] or here[1] != after[1]
        if ends:
            heap.append((-given[pick[n], 3], first, n))
            first = n + 1
    heapq.heapify(heap)
    return heap


@numba.njit(cache=True)
def _fetch(
    sample: int,
    prefix: int,
    taker: int,
    gave: bool,
    fragments: Fragments,
    books: Books,
    sign: int,
) -> bool:
    """Count K and V of rows [0, prefix) of one column towards the taker: +1 to fetch them where
    the limits let it, -1 to take that back.  Says whether they fit.

    All is counted as sent by those who hold it: relays are taken only where they let no worker send
    more than the busiest of these.
    """
    begin, low, high, worker = fragments
    moved, limits, _, _, kv_row = books
    held, own = 0, 0  # rows that the taker has anyway, for rows of its own
    for i in range(begin[sample], begin[sample + 1]):
        if worker[i] == taker and not gave:  # who gave may not need the column itself
            held = high[i]
            own += high[i] - low[i]
    if prefix <= held:
        return True
    arriving = 0
    for i in range(begin[sample], begin[sample + 1]):
        if worker[i] == taker:
            continue
        leaving = max(0, min(high[i], prefix) - max(low[i], held)) * kv_row
        arriving += leaving
        if sign > 0 and leaving > 0 and moved[0, worker[i]] + leaving > limits[0]:
            return False
    # All rows side by side, own ones too, in place of those that lay so for rows of its own.
    kept = (prefix - (held if own < held else 0)) * kv_row
    if sign > 0 and moved[1, taker] + arriving > limits[1]:
        return False
    if sign > 0 and moved[2, taker] + kept > limits[2]:
        return False
    for i in range(begin[sample], begin[sample + 1]):
        if worker[i] != taker:
            leaving = max(0, min(high[i], prefix) - max(low[i], held)) * kv_row
            moved[0, worker[i]] += sign * leaving
    moved[1, taker] += sign * arriving
    moved[2, taker] += sign * kept
    return True
