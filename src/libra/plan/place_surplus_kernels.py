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
    """Bytes that work away from home moves, and the limits on them."""

    moved: IntArray
    """Bytes that each worker sends, receives and holds for it, [3, workers]; updated likewise."""
    limits: IntArray
    """Most bytes of each for a worker, [3]."""
    q_row: int
    """Q of one row and column."""
    o_row: int
    """Output of one row and column."""
    kv_row: int
    """K and V of one row and column."""


class Surplus(NamedTuple):
    """All that the loops read and update."""

    shards: SampleShards
    loads: Loads
    budget: ByteBudget
    given: IntArray
    """Pieces that workers give away, [pieces, 5]: sample, column, first row, one past the last row,
    shard; the row past the last falls as workers take late rows.
    """


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
    surplus = Surplus(shards, loads, budget, _give(shards, latest_first, columns, loads))
    taken = [(0, 0, 0, 0, 0) for _ in range(0)]
    nodes = int(node.max()) + 1
    if node_local_first and 1 < nodes < len(node):
        for only in range(nodes):
            _hand_out(surplus, taken, node, only, False)
    _hand_out(surplus, taken, node, -1, False)
    if (surplus.given[:, 3] > surplus.given[:, 2]).any():
        _hand_out(surplus, taken, node, -1, True)
    return _table(taken)


@numba.njit(cache=True)
def _table(rows: list[tuple[int, int, int, int, int]]) -> IntArray:
    table = np.empty((len(rows), 5), dtype=np.int64)
    for i in range(len(rows)):
        table[i, 0], table[i, 1], table[i, 2], table[i, 3], table[i, 4] = rows[i]
    return table


@numba.njit(cache=True)
def _give(shards: SampleShards, latest_first: IntArray, columns: int, loads: Loads) -> IntArray:
    """Pieces that workers above their target give away: whole columns, then the late rows of one
    more.

    int64 [pieces, 5]: sample, column, first row, one past the last row, shard; ordered.
    """
    begin, low, high, worker = shards
    load, target, width, step = loads
    sample = np.empty(len(low), dtype=np.int64)
    for s in range(len(begin) - 1):
        sample[begin[s] : begin[s + 1]] = s
    given = [(0, 0, 0, 0, 0) for _ in range(0)]  # numba infers the type of an empty list so
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
    return _table(given)


@numba.njit(cache=True)
def _hand_out(
    surplus: Surplus,
    taken: list[tuple[int, int, int, int, int]],
    node: IntArray,
    only: int,
    second_pass: bool,
) -> None:
    """Workers below their target take from the stacks, those with most room first; workers of node
    `only` take from each other, or -1 for all.

    In the second pass a taker whose room is less than a stack's next row looks through the others.
    """
    shards, loads, _, given = surplus
    load, target = loads.load, loads.target
    home = shards.worker[given[:, 4]]
    # Pieces that still have rows to give, as a heap of stacks.
    pick = [i for i in range(len(given)) if given[i, 3] > given[i, 2]]
    if only >= 0:
        pick = [i for i in pick if node[home[i]] == only]
    heap = _stacks(given, pick)

    # Takers, those with most room first.
    gave = np.zeros(len(load), dtype=np.bool_)  # these may have room for less than a row step
    gave[home] = True
    room = [(0.0, 0) for _ in range(0)]
    for taker in range(len(load)):
        if load[taker] < target[taker] and (only < 0 or node[taker] == only):
            room.append((load[taker] - target[taker], taker))
    room.sort()
    for negative, taker in room:
        _fill(surplus, taken, taker, -negative, gave[taker], heap, pick, second_pass)


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
def _fill(
    surplus: Surplus,
    taken: list[tuple[int, int, int, int, int]],
    taker: int,
    room: float,
    gave: bool,
    heap: list[tuple[int, int, int]],
    pick: list[int],
    second_pass: bool,
) -> None:
    """One worker takes from the stacks, the highest row first, until it has no room left."""
    shards, _, budget, given = surplus
    refused = [(0, 0, 0) for _ in range(0)]  # stacks that the limits keep from this taker
    while len(heap) > 0 and room > 0:
        top, first, last = heapq.heappop(heap)
        sample, prefix = given[pick[last], 0], -top
        if _fetch(sample, prefix, taker, gave, shards, budget, 1):
            last, room, used = _take(surplus, taken, taker, room, first, last, pick, second_pass)
            if not used:
                _fetch(sample, prefix, taker, gave, shards, budget, -1)
        if last >= first:
            rest = (-given[pick[last], 3], first, last)
            if room > 0:
                refused.append(rest)
            else:
                heapq.heappush(heap, rest)
    for stack in refused:
        heapq.heappush(heap, stack)


@numba.njit(cache=True)
def _take(
    surplus: Surplus,
    taken: list[tuple[int, int, int, int, int]],
    taker: int,
    room: float,
    first: int,
    last: int,
    pick: list[int],
    second_pass: bool,
) -> tuple[int, float, bool]:
    """Take late rows of a stack, whose keys one fetched prefix serves; returns (its last piece now,
    room left, whether any row was taken).
    """
    shards, loads, budget, given = surplus
    load, _, width, step = loads
    moved, limits, q_row, o_row, _ = budget
    fits, used = True, False
    while fits and last >= first and room > 0:
        i = pick[last]
        from_row, to_row, home = given[i, 2], given[i, 3], shards.worker[given[i, 4]]
        # Step 1: the first row to take, as room and limits let it.
        row = from_row
        full = (pairs_below(to_row) - pairs_below(from_row)) * width > room
        if full:
            row = row_below(pairs_below(to_row) - room / width) + 1
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
        # Step 2: move rows [row, to_row), and count them.
        if row < to_row:
            rows = to_row - row
            work = (pairs_below(to_row) - pairs_below(row)) * width
            taken.append((given[i, 0], given[i, 1], row, to_row, taker))
            given[i, 3] = row
            room -= work
            load[taker] += work
            moved[0, home] += rows * q_row
            moved[1, home] += rows * o_row
            moved[0, taker] += rows * o_row
            moved[1, taker] += rows * q_row
            moved[2, taker] += rows * (q_row + o_row)
            used = True
        # Step 3: go on to the next piece, to another stack, or end.
        if row <= from_row or (stuck and fits):
            last -= 1
        elif full and second_pass:
            fits = False
        elif full:
            room = 0.0
    return last, room, used


@numba.njit(cache=True)
def _fetch(
    sample: int,
    prefix: int,
    taker: int,
    gave: bool,
    shards: SampleShards,
    budget: ByteBudget,
    sign: int,
) -> bool:
    """Count K and V of rows [0, prefix) of one column towards the taker: sign +1 to fetch them
    where the limits let it, -1 to undo that.  Returns whether they fit.

    All rows are counted as sent by their holders: a multicast is used only where it lets no worker
    send more than the busiest of these.
    """
    begin, low, high, worker = shards
    moved, limits, _, _, kv_row = budget
    # Fetched rows start where the rows that the taker has anyway end.
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
    # All rows in one buffer, own ones too, in place of a buffer for rows of its own.
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
