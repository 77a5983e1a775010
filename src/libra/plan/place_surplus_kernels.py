"""The compiled loops of the surplus placement: which pieces workers give away, and who takes them.

fragments of sample 0   |  worker 0  |  worker 1  |  worker 2  |
given by worker 2                            |#####| column 0    a *piece*: rows of one column
stack of column 0       pieces of one sample and column, from late rows to early ones
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import IntArray

FloatArray = NDArray[np.float64]


class SampleShards(NamedTuple):
    """Rows [low, high) that each worker holds of each sample, ordered by sample, then row."""

    begin: IntArray
    """First shard of each sample, then their number, [samples + 1]."""
    sample: IntArray
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
    """Pieces are cut at multiples of so many rows."""


class ByteBudget(NamedTuple):
    """Bytes that work away from home moves, and the limits on them.  Entries 0, 1 and 2 are the
    bytes that a worker sends, receives and holds.
    """

    moved: IntArray
    """Of each worker, [3, workers]; updated likewise."""
    limits: IntArray
    """Most for a worker, [3]."""
    home_row: IntArray
    """Of the home of a row and column that moves, [3]: it sends Q and receives the output."""
    taker_row: IntArray
    """Of the worker that takes it, [3]."""
    kv_row: int
    """K and V of one row and column."""


class Surplus(NamedTuple):
    """All that the loops read and update."""

    shards: SampleShards
    loads: Loads
    budget: ByteBudget
    gave: NDArray[np.bool_]
    """Workers that gave work away, [workers]; they may have room for less than a row step."""
    taken: list[tuple[int, int, int, int, int]]
    """Moved pieces: sample, column, first row, one past the last row, taker."""


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
    shards: SampleShards,
    latest_first: IntArray,
    columns: int,
    loads: Loads,
    budget: ByteBudget,
    node: IntArray,
    node_local_first: bool,
) -> IntArray:
    """Moved pieces, int64 [pieces, 5]: sample, column, first row, one past the last row, taker.

    `latest_first` orders shards by worker, then latest row first: the order in which a worker
    gives.  `node` [workers] ascends from 0; with `node_local_first` the workers of a node take each
    other's surplus before those of other nodes do.
    """
    given = _give(shards, latest_first, columns, loads)
    gave = np.zeros(len(node), dtype=np.bool_)
    gave[shards.worker[given[:, 4]]] = True
    taken = [(0, 0, 0, 0, 0)]  # gives the list its type
    surplus = Surplus(shards, loads, budget, gave, taken)
    nodes = int(node.max()) + 1
    if node_local_first and 1 < nodes < len(node):
        for only in range(nodes):
            _hand_out(surplus, given, node == only, False)
    everyone = np.ones(len(node), dtype=np.bool_)
    _hand_out(surplus, given, everyone, False)
    _hand_out(surplus, given, everyone, True)
    return np.array(taken)[1:]


@numba.njit(cache=True)
def _give(shards: SampleShards, latest_first: IntArray, columns: int, loads: Loads) -> IntArray:
    """Pieces that workers above their target give away: whole columns, then the late rows of one
    more.

    int64 [pieces, 5]: sample, column, first row, one past the last row, shard; ordered.  The row
    past the last falls as workers take late rows.
    """
    _, sample, low, high, worker = shards
    load, target, width, step = loads
    given = [(0, 0, 0, 0, 0)]  # gives the list its type; the least of all
    for i in latest_first:
        home = worker[i]
        surplus = load[home] - target[home]
        work = (pairs_below(high[i]) - pairs_below(low[i])) * width  # of one column
        if surplus <= 0:
            continue
        # As many whole columns as the surplus holds, ...
        whole = min(columns, int(surplus // work))
        for column in range(whole):
            given.append((sample[i], column, low[i], high[i], i))
        load[home] -= whole * work
        surplus -= whole * work
        # ... and of one more column the latest rows that hold the rest, rounded up to a step.
        if whole < columns and surplus > 0:
            row = row_below(pairs_below(high[i]) - surplus / width) // step * step
            row = max(row, low[i])
            given.append((sample[i], whole, row, high[i], i))
            load[home] -= (pairs_below(high[i]) - pairs_below(row)) * width
    given.sort()
    return np.array(given)[1:]


@numba.njit(cache=True)
def _hand_out(
    surplus: Surplus, given: IntArray, among: NDArray[np.bool_], second_pass: bool
) -> None:
    """Workers below their target take from the stacks, those with most room first; `among`
    [workers] are those who take from each other.

    In the second pass a taker whose room is less than a stack's next row looks through the others.
    """
    shards, loads = surplus.shards, surplus.loads
    picked = np.flatnonzero((given[:, 3] > given[:, 2]) & among[shards.worker[given[:, 4]]])
    pieces = given[picked]
    stacks = _stacks(pieces)
    room = loads.target - loads.load
    takers = np.flatnonzero((room > 0) & among)
    for taker in takers[np.argsort(-room[takers], kind="mergesort")]:
        if len(stacks) == 0:
            break
        _fill(surplus, pieces, stacks, taker, room[taker], second_pass)
    given[picked] = pieces


@numba.njit(cache=True)
def _stacks(pieces: IntArray) -> list[tuple[int, int, int]]:
    """A heap of (-highest row, first, last): runs of pieces with one sample and column."""
    heap = [(0, 0, 0) for _ in range(0)]  # an empty list of this type
    first = 0
    for last in range(len(pieces)):
        here, after = pieces[last], pieces[min(last + 1, len(pieces) - 1)]
        if last + 1 == len(pieces) or here[0] != after[0] or here[1] != after[1]:
            heap.append((-pieces[last, 3], first, last))
            first = last + 1
    heapq.heapify(heap)
    return heap


@numba.njit(cache=True)
def _fill(
    surplus: Surplus,
    pieces: IntArray,
    stacks: list[tuple[int, int, int]],
    taker: int,
    room: float,
    second_pass: bool,
) -> None:
    """One worker takes from the stacks, the highest row first, until it has no room left."""
    refused = [(0, 0, 0) for _ in range(0)]  # stacks that the limits keep from this taker
    while len(stacks) > 0 and room > 0:
        top, first, last = heapq.heappop(stacks)
        sample, before = pieces[last, 0], len(surplus.taken)
        if _count_fetch(surplus, sample, -top, taker, 1):
            last, room = _take(surplus, pieces[first : last + 1], taker, room, second_pass)
            last += first
            if len(surplus.taken) == before:
                _count_fetch(surplus, sample, -top, taker, -1)
        if last >= first:
            rest = (-pieces[last, 3], first, last)
            if room > 0:
                refused.append(rest)
            else:
                heapq.heappush(stacks, rest)
    for stack in refused:
        heapq.heappush(stacks, stack)


@numba.njit(cache=True)
def _take(
    surplus: Surplus, stack: IntArray, taker: int, room: float, second_pass: bool
) -> tuple[int, float]:
    """Take late rows of a stack, whose keys one fetched prefix serves; returns (its last piece now,
    room left).
    """
    shards, (load, _, width, step), budget, _, taken = surplus
    last, fits = len(stack) - 1, True
    while fits and last >= 0 and room > 0:
        from_row, to_row = stack[last, 2], stack[last, 3]
        home = shards.worker[stack[last, 4]]
        # Step 1: the first row to take, as room and limits let it.
        row = from_row
        full = (pairs_below(to_row) - pairs_below(from_row)) * width > room
        if full:
            row = row_below(pairs_below(to_row) - room / width) + 1
        by_home = _first_allowed(budget, home, budget.home_row, to_row)
        by_taker = _first_allowed(budget, taker, budget.taker_row, to_row)
        stuck = by_home > row  # no one can take the rest of this piece
        fits = by_taker <= max(row, by_home)
        row = max(row, by_home, by_taker)
        if row > from_row:
            row = -(-row // step) * step
        # Step 2: move rows [row, to_row), and count them.
        if row < to_row:
            work = (pairs_below(to_row) - pairs_below(row)) * width
            taken.append((stack[last, 0], stack[last, 1], row, to_row, taker))
            stack[last, 3] = row
            room -= work
            load[taker] += work
            for kind in range(3):
                budget.moved[kind, home] += (to_row - row) * budget.home_row[kind]
                budget.moved[kind, taker] += (to_row - row) * budget.taker_row[kind]
        # Step 3: go on to the next piece, to another stack, or end.
        if row <= from_row or (stuck and fits):
            last -= 1
        elif full and second_pass:
            fits = False
        elif full:
            room = 0.0
    return last, room


@numba.njit(cache=True)
def _first_allowed(budget: ByteBudget, worker: int, row_bytes: IntArray, stop: int) -> int:
    """First of the rows before `stop` that the limits of a worker let move together."""
    first = 0
    for kind in range(3):
        if row_bytes[kind] > 0:
            left = budget.limits[kind] - budget.moved[kind, worker]
            first = max(first, stop - left // row_bytes[kind])
    return first


@numba.njit(cache=True)
def _count_fetch(surplus: Surplus, sample: int, prefix: int, taker: int, sign: int) -> bool:
    """Count K and V of rows [0, prefix) of one column towards the taker: sign +1 to fetch them
    where the limits let it, -1 to undo that.  Returns whether they fit.

    All rows are counted as sent by their holders: a multicast is used only where it lets no worker
    send more than the busiest of these.
    """
    begin, _, low, high, worker = surplus.shards
    moved, limits, _, _, kv_row = surplus.budget
    shards = range(begin[sample], begin[sample + 1])
    # Fetched rows start where the rows that the taker has anyway end.
    held, own = 0, 0  # rows that the taker has anyway, for rows of its own
    for i in shards:
        if worker[i] == taker and not surplus.gave[taker]:  # who gave may not need the column
            held = high[i]
            own += high[i] - low[i]
    if prefix <= held:
        return True
    # All rows in one buffer, own ones too, in place of a buffer for rows of its own.
    kept = (prefix - (held if own < held else 0)) * kv_row
    if sign > 0 and moved[2, taker] + kept > limits[2]:
        return False
    arriving = 0
    for i in shards:
        leaving = (min(high[i], prefix) - max(low[i], held)) * kv_row
        if worker[i] != taker and leaving > 0:
            if sign > 0 and moved[0, worker[i]] + leaving > limits[0]:
                return False
            arriving += leaving
    if sign > 0 and moved[1, taker] + arriving > limits[1]:
        return False
    for i in shards:
        if worker[i] != taker:
            moved[0, worker[i]] += sign * max(0, min(high[i], prefix) - max(low[i], held)) * kv_row
    moved[1, taker] += sign * arriving
    moved[2, taker] += sign * kept
    return True
