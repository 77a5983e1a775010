"""K and V rows that several workers of other nodes fetch: sent once, then passed on.

    direct       s -> a,  s -> b,  s -> c        a row leaves its holder once for each destination
    multicast    s -> b;  b -> a,  b -> c        a row leaves its holder once; a destination that
                                                 needs it anyway passes it on to the others

This is a scatter followed by an all-gather.  Every worker still receives every row once and as many
bytes travel, but not all of them from the few workers that hold a long sample.  Only destinations
outside the holder's node take part, because links within a node are fast.

All runs of a group (one holder, sample and kv head group) start at the same row and differ in
length.  The rows that two or more need are cut into *slices*, and each slice goes to one of the
destinations that need it whole:

    run to a    |===============|           slice 0 goes to c, which passes it on to a and b
    run to b    |=============|             slice 1 goes to b, which passes it on to a and c
    run to c    |==========|                the last rows, which only a needs, go to a directly
    slices      |  0   |  1   |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from libra.data.lengths import IntArray
from libra.plan.geometry import differs, run_bounds, spread
from libra.plan.kv_fetch import KVFetches, KVTransfers, in_order

FEWEST_ROWS: Final = 16
"""Slices of fewer rows are not worth a second message."""

_SLICES: Final = 2
"""Slices of a sample for each destination: more of them spread the work of passing on better, at
more runs.
"""


def multicast_runs(
    direct: KVTransfers, fetches: KVFetches, *, workers: int, per_node: int
) -> KVTransfers:
    """The same rows for the same fetches, passed on between nodes of `per_node` neighbouring
    workers where several destinations need them; `direct` itself where none are.

    Deterministic: a slice goes to the destination that has least to pass on in its chunk so far,
    among equals to the one that needs most rows of the group.
    """
    groups = _far_groups(direct, fetches, workers, per_node)
    if not groups.shared.any():
        return direct
    slices = _cut_slices(groups)
    member = groups.first[slices.group] + _least_busy(groups, slices, workers)
    hop_one = _hop_one(direct, groups, slices, member)
    hop_two = _hop_two(groups, slices, member, len(hop_one.fetch) - len(member))
    return in_order(hop_one.concatenate(hop_two), fetches)


def relieves(direct: IntArray, multicast: IntArray, per_node: int) -> bool:
    """Whether a multicast lets the worker that sends most to other nodes send less, and lets none
    send more in all than the busiest did: limits that hold without it then hold with it.

    Takes the bytes from worker i to worker j without and with it, int64 [workers, workers] each.
    """
    node = np.arange(len(direct)) // per_node
    far = node[:, None] != node
    less_far = (multicast * far).sum(axis=1).max() < (direct * far).sum(axis=1).max()
    return bool(less_far and multicast.sum(axis=1).max() <= direct.sum(axis=1).max())


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """The runs that leave their node, group by group, longest first; int64."""

    index: IntArray
    """Index of each run, [members]; a *member* is a place in this order."""
    runs: KVTransfers
    """The runs in this order."""
    group: IntArray
    """Group of each member."""
    first: IntArray
    """First member of each group, [groups]."""
    count: IntArray
    """Members of each group."""
    sample: IntArray
    """Number of the (chunk, sample, kv head group) of each group, ascending."""
    shared: IntArray
    """Rows of each group that travel by multicast: those that two or more members need."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slices:
    """Slices of the shared rows; int64 [slices]."""

    group: IntArray
    low: IntArray
    """First row, counted from the first row of the group."""
    high: IntArray
    whole: IntArray
    """Leading members of the group that need the slice whole."""
    needing: IntArray
    """Leading members that need any row of it."""
    passed_on: IntArray
    """Rows to pass on: those that all members but the chosen one need."""


def _far_groups(direct: KVTransfers, fetches: KVFetches, workers: int, per_node: int) -> _Groups:
    far = np.flatnonzero(direct.source // per_node != direct.destination // per_node)
    sample = direct.chunk * (1 + int(fetches.sample.max(initial=0))) + fetches.sample[direct.fetch]
    sample = sample * (1 + int(direct.kv_head_group.max(initial=0))) + direct.kv_head_group
    # By sample, then holder (whose first row is `offset`), then longest first, then destination.
    shorter = direct.destination - direct.length * workers
    far = far[np.lexsort((shorter[far], direct.offset[far], sample[far]))]
    runs, new_sample = direct.take(far), differs(sample[far])
    opens = new_sample | differs(runs.offset)
    first, last = run_bounds(opens)

    # The second longest run ends where fewer than two members need the rows.
    shared = np.where(last > first, runs.length[np.minimum(first + 1, last)], 0)
    return _Groups(
        index=far,
        runs=runs,
        group=np.cumsum(opens) - 1,
        first=first,
        count=last - first + 1,
        sample=np.cumsum(new_sample)[first] - 1,
        shared=np.where(shared < FEWEST_ROWS, 0, shared),
    )


def _cut_slices(groups: _Groups) -> _Slices:
    # Step 1: cut the shared rows of a sample into nearly equal slices, none across two holders.
    # With 3 destinations, 6 slices: holders of 100 and 50 shared rows get 4 and 2 of them.
    of_sample = np.bincount(groups.sample, weights=groups.shared).astype(np.int64)[groups.sample]
    slices = -(-_SLICES * groups.count * groups.shared // np.maximum(of_sample, 1))
    slices = np.minimum(slices, groups.shared // FEWEST_ROWS)
    group = np.repeat(np.arange(len(groups.first)), slices)
    number = spread(np.zeros_like(slices), slices)
    low = number * groups.shared[group] // slices[group]
    high = (number + 1) * groups.shared[group] // slices[group]

    # Step 2: count the members that need a slice.  Lengths fall within a group, so that
    # `group * span - length` rises over all members, and one binary search finds the last of a
    # group that is at least as long as a row.
    length = groups.runs.length
    span = int(length.max()) + 1
    key = groups.group * span - length
    first = groups.first[group]
    whole = np.searchsorted(key, group * span - high, side="right") - first
    needing = np.searchsorted(key, group * span - low, side="left") - first

    # Step 3: rows that the members need, less those of the one that passes them on.
    below = np.append(0, np.cumsum(length))
    in_part = below[first + needing] - below[first + whole] - (needing - whole) * low
    return _Slices(group, low, high, whole, needing, (whole - 1) * (high - low) + in_part)


def _least_busy(groups: _Groups, slices: _Slices, workers: int) -> IntArray:
    """Which member of its group passes each slice on: of those that need it whole, the one whose
    worker passes on least so far.  Slices of few candidates choose first.
    """
    chosen = np.zeros(len(slices.group), dtype=np.int64)
    first = groups.first[slices.group]
    chunks = groups.runs.chunk[first]
    busy = [[0] * workers for _ in range(1 + int(chunks.max()))]  # rows, by chunk and worker
    worker = groups.runs.destination.tolist()
    columns = (first, slices.whole, slices.passed_on, chunks)
    begin, among, rows, chunk = (column.tolist() for column in columns)
    for i in np.argsort(slices.whole, kind="stable").tolist():
        load, candidates = busy[chunk[i]], worker[begin[i] : begin[i] + among[i]]
        loads = [load[candidate] for candidate in candidates]
        index = loads.index(min(loads))
        load[candidates[index]] += rows[i]
        chosen[i] = index
    return chosen


def _hop_one(
    direct: KVTransfers, groups: _Groups, slices: _Slices, member: IntArray
) -> KVTransfers:
    """What leaves the holders: groups without shared rows as before, the last rows of the longest
    run of other groups, and each slice, in this order.
    """
    multicast = groups.shared > 0
    ends = multicast & (groups.runs.length[groups.first] > groups.shared)
    end_run, shared = groups.index[groups.first[ends]], groups.shared[ends]
    shares = groups.index[np.repeat(multicast, groups.count)]
    kept = np.delete(np.arange(len(direct.fetch)), shares)
    run = np.concatenate([kept, end_run, groups.index[member]])
    low = np.concatenate([np.zeros_like(kept), shared, slices.low])
    high = np.concatenate([direct.length[kept], direct.length[end_run], slices.high])
    return _part(direct.take(run), low, high)


def _hop_two(groups: _Groups, slices: _Slices, member: IntArray, first_slice: int) -> KVTransfers:
    """What the chosen members pass on; run `first_slice + i` of the first hop brings slice i."""
    index = np.repeat(np.arange(len(slices.group)), slices.needing)
    to = spread(groups.first[slices.group], slices.needing)
    index, to = index[to != member[index]], to[to != member[index]]
    runs = groups.runs.take(to)
    return replace(
        _part(runs, slices.low[index], np.minimum(runs.length, slices.high[index])),
        source=groups.runs.destination[member[index]],
        source_row=np.full_like(index, -1),
        via=first_slice + index,
    )


def _part(runs: KVTransfers, low: IntArray, high: IntArray) -> KVTransfers:
    """Rows [low, high) of each run."""
    return replace(
        runs, source_row=runs.source_row + low, length=high - low, offset=runs.offset + low
    )
