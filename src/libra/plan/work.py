"""Every kernel segment of a pool at once: what all workers' routes launch, without the routes.

Segments of a worker are its visits (block, sample), joined where one continues another, for each
lane.  Whether a visit continues the one before depends on the head shard alone, and all else on its
*column*, the lanes of one shard that read one kv lane; so nothing is sorted, and lanes appear only
where each makes a segment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from libra.plan.geometry import spread
from libra.plan.lanes import Lanes
from libra.plan.launches import LOCAL
from libra.plan.plan import PoolPlan
from libra.workload import causal_pairs

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """All kernel segments of a pool, in no order that means anything; int64 [segments] each."""

    worker: IntArray
    chunk: IntArray
    """Chunk whose arrival it waits for; LOCAL waits for nothing."""
    q_buffer: IntArray
    """Chunk whose fetched Q it reads, or LOCAL."""
    kv_buffer: IntArray
    """Chunk whose fetched K and V it reads, or LOCAL."""
    q_len: IntArray
    k_len: IntArray
    heads: IntArray
    """Query heads."""
    kv_heads: IntArray

    def __len__(self) -> int:
        return len(self.worker)

    @property
    def pairs(self) -> IntArray:
        """Query-key pairs times heads."""
        return causal_pairs(self.k_len - self.q_len, self.k_len) * self.heads


def pool_work(plan: PoolPlan) -> Work:
    """The segments of all launches of all workers, as `worker_route` makes them."""
    geometry, lanes, needs = plan.geometry, plan.lanes, plan.needs
    visits, columns = geometry.visits, _columns(lanes)
    worker = plan.assignment.reshape(-1, lanes.shards)[visits.first]
    at_home = worker == geometry.block_worker[visits.first][:, None]
    opens, last = _runs(plan, worker, at_home)

    visit, column = np.nonzero(opens[:, columns.shard])  # ordered by visit, then lane
    shard = columns.shard[column]
    last = last[visit, shard]
    sample = visits.second[visit]
    who = worker[visit, shard].astype(np.int64)
    need = needs.find(who, sample, columns.kv_lane[column], lanes)
    home, resident = at_home[visit, shard], needs.resident[need]
    q_len = visits.stop[last] - visits.start[visit]
    k_len = visits.stop[last] - geometry.sample_start[sample]
    kv_buffer = np.where(resident, LOCAL, needs.chunk[need])

    local = np.flatnonzero(home & resident)
    first, first_lane, width = _lane_runs(visit[local], column[local], last[local], columns, lanes)
    first = local[first]
    first_kv, last_kv = lanes.kv_lane(first_lane), lanes.kv_lane(first_lane + width - 1)
    at_once = Work(
        worker=who[first],
        chunk=np.full_like(first, LOCAL),
        q_buffer=np.full_like(first, LOCAL),
        kv_buffer=np.full_like(first, LOCAL),
        q_len=q_len[first],
        k_len=k_len[first],
        heads=width * lanes.heads,
        kv_heads=(last_kv - first_kv + 1) * lanes.kv_heads,
    )

    waits = np.flatnonzero(~(home & resident))
    each = np.repeat(waits, columns.lanes[column[waits]])  # a segment for every lane
    chunk = lanes.chunk(spread(columns.lane[column[waits]], columns.lanes[column[waits]]))
    by_chunk = Work(
        worker=who[each],
        chunk=chunk,
        q_buffer=np.where(home[each], LOCAL, chunk),
        kv_buffer=kv_buffer[each],
        q_len=q_len[each],
        k_len=k_len[each],
        heads=np.full_like(each, lanes.heads),
        kv_heads=np.full_like(each, lanes.kv_heads),
    )
    return Work(
        **{
            field.name: np.concatenate(
                [getattr(at_once, field.name), getattr(by_chunk, field.name)]
            )
            for field in fields(Work)
        }
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Lanes of one head shard that read one kv lane, in lane order; int64 [columns]."""

    shard: IntArray
    kv_lane: IntArray
    lane: IntArray
    """First lane."""
    lanes: IntArray
    """How many."""


def _columns(lanes: Lanes) -> _Columns:
    lane = np.arange(lanes.count, dtype=np.int64)
    shard, kv_lane = lane // lanes.per_shard, lanes.kv_lane(lane)
    opens = np.ones(lanes.count, dtype=np.bool_)
    opens[1:] = (shard[1:] != shard[:-1]) | (kv_lane[1:] != kv_lane[:-1])
    first = np.flatnonzero(opens)
    return _Columns(shard[first], kv_lane[first], first, np.diff(np.append(first, lanes.count)))


def _runs(
    plan: PoolPlan, worker: NDArray[np.int32], at_home: BoolArray
) -> tuple[BoolArray, IntArray]:
    """Whether each (visit, shard) opens a segment, and the last visit of the segment that it opens.

    A visit continues the one before it where both are of one sample, at one worker, side by side in
    the rows of the q buffer: rows of one home always, fetched rows if no other lane or tile lies
    between.
    """
    geometry, lanes = plan.geometry, plan.lanes
    visits = geometry.visits
    count = len(visits.first)
    length = visits.stop - visits.start
    into_block = visits.start - geometry.block_start[visits.first]
    row = geometry.block_local[visits.first] + into_block

    continues = np.zeros((count, lanes.shards), dtype=np.bool_)
    beside = row[1:] == row[:-1] + length[:-1]
    continues[1:] = at_home[1:] & at_home[:-1] & beside[:, None]
    if lanes.per_chunk == 1:
        fetched = _fetched_rows(plan)[visits.first] + into_block[:, None]
        beside = fetched[1:] == fetched[:-1] + length[:-1, None]
        continues[1:] |= ~at_home[1:] & ~at_home[:-1] & beside
    continues[1:] &= worker[1:] == worker[:-1]
    same = (visits.second[1:] == visits.second[:-1]) & (visits.start[1:] == visits.stop[:-1])
    continues[1:] &= same[:, None]

    opens = ~continues
    following = np.where(opens, np.arange(count)[:, None], count)
    following = np.minimum.accumulate(following[::-1], axis=0)[::-1]  # itself where it opens one
    last = np.full((count, lanes.shards), count - 1, dtype=np.int64)
    last[:-1] = following[1:] - 1
    return opens, last


def _fetched_rows(plan: PoolPlan) -> IntArray:
    """Row of each moved tile in the order in which Q arrives, [blocks, shards].

    Counted through the pool: only rows of one worker may be compared.
    """
    geometry, shards = plan.geometry, plan.lanes.shards
    home = np.repeat(geometry.block_worker, shards)
    rows = np.repeat(geometry.block_stop - geometry.block_start, shards)
    moved = np.flatnonzero((home != plan.assignment) & (rows > 0))
    key = plan.assignment[moved].astype(np.int64) * plan.workers + home[moved]
    moved = moved[np.argsort(key, kind="stable")]
    first = np.zeros(len(home), dtype=np.int64)
    first[moved] = np.cumsum(rows[moved]) - rows[moved]
    return first.reshape(-1, shards)


def _lane_runs(
    visit: IntArray, column: IntArray, last: IntArray, columns: _Columns, lanes: Lanes
) -> tuple[IntArray, IntArray, IntArray]:
    """Local segments of equal rows joined over neighbouring lanes.

    Takes them by visit, then column; returns (index of a column that has the segment's rows, first
    lane, lanes) of each segment.  A run that would tear a query group stays in single lanes.
    """
    opens = np.ones(len(visit), dtype=np.bool_)
    opens[1:] = (
        (visit[1:] != visit[:-1]) | (column[1:] != column[:-1] + 1) | (last[1:] != last[:-1])
    )
    first = np.flatnonzero(opens)
    final = np.append(first[1:], len(opens))[: len(first)] - 1
    lane = columns.lane[column[first]]
    width = columns.lane[column[final]] + columns.lanes[column[final]] - lane
    from_head, to_head = lane * lanes.heads, (lane + width) * lanes.heads
    whole_groups = (from_head % lanes.group == 0) & (to_head % lanes.group == 0)
    one_group = from_head // lanes.group == (to_head - 1) // lanes.group
    joins = whole_groups | one_group
    count = np.where(joins, 1, width)
    return (
        np.repeat(first, count),
        spread(lane, count),
        np.repeat(np.where(joins, width, 1), count),
    )
