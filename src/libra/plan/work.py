"""Every kernel segment of a pool at once: what all workers' rank_plans launch, without the rank_plans.

AttentionCall of a worker are its block_samples (block, sample), joined where one continues another, for each
head_group.  Whether a visit continues the one before depends on the head shard alone, and all else on its
*column*, the head_groups of one shard that read one kv head_group; so nothing is sorted, and head_groups appear only
where each makes a segment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import causal_pairs
from libra.plan.attention_calls import LOCAL
from libra.plan.geometry import spread
from libra.plan.head_groups import HeadGroups
from libra.plan.plan_pool import PoolPlan

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
    """The segments of all launches of all workers, as `make_rank_plan` makes them."""
    geometry, head_groups, needs = plan.geometry, plan.head_groups, plan.kv_fetches
    block_samples, columns = geometry.block_samples, _columns(head_groups)
    worker = plan.assignment.reshape(-1, head_groups.shards)[block_samples.first]
    at_home = worker == geometry.block_worker[block_samples.first][:, None]
    opens, last = _runs(plan, worker, at_home)

    visit, column = np.nonzero(opens[:, columns.shard])  # ordered by visit, then head_group
    shard = columns.shard[column]
    last = last[visit, shard]
    sample = block_samples.second[visit]
    who = worker[visit, shard].astype(np.int64)
    need = needs.find(who, sample, columns.kv_head_group[column], head_groups)
    home, resident = at_home[visit, shard], needs.resident[need]
    q_len = block_samples.stop[last] - block_samples.start[visit]
    k_len = block_samples.stop[last] - geometry.sample_start[sample]
    kv_buffer = np.where(resident, LOCAL, needs.chunk[need])

    local = np.flatnonzero(home & resident)
    first, first_lane, width = _lane_runs(
        visit[local], column[local], last[local], columns, head_groups
    )
    first = local[first]
    first_kv, last_kv = (
        head_groups.kv_head_group(first_lane),
        head_groups.kv_head_group(first_lane + width - 1),
    )
    at_once = Work(
        worker=who[first],
        chunk=np.full_like(first, LOCAL),
        q_buffer=np.full_like(first, LOCAL),
        kv_buffer=np.full_like(first, LOCAL),
        q_len=q_len[first],
        k_len=k_len[first],
        heads=width * head_groups.heads,
        kv_heads=(last_kv - first_kv + 1) * head_groups.kv_heads,
    )

    waits = np.flatnonzero(~(home & resident))
    each = np.repeat(waits, columns.head_groups[column[waits]])  # a segment for every head_group
    chunk = head_groups.chunk(
        spread(columns.head_group[column[waits]], columns.head_groups[column[waits]])
    )
    by_chunk = Work(
        worker=who[each],
        chunk=chunk,
        q_buffer=np.where(home[each], LOCAL, chunk),
        kv_buffer=kv_buffer[each],
        q_len=q_len[each],
        k_len=k_len[each],
        heads=np.full_like(each, head_groups.heads),
        kv_heads=np.full_like(each, head_groups.kv_heads),
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
    """HeadGroups of one head shard that read one kv head_group, in head_group order; int64 [columns]."""

    shard: IntArray
    kv_head_group: IntArray
    head_group: IntArray
    """First head_group."""
    head_groups: IntArray
    """How many."""


def _columns(head_groups: HeadGroups) -> _Columns:
    head_group = np.arange(head_groups.count, dtype=np.int64)
    shard, kv_head_group = (
        head_group // head_groups.per_shard,
        head_groups.kv_head_group(head_group),
    )
    opens = np.ones(head_groups.count, dtype=np.bool_)
    opens[1:] = (shard[1:] != shard[:-1]) | (kv_head_group[1:] != kv_head_group[:-1])
    first = np.flatnonzero(opens)
    return _Columns(
        shard[first], kv_head_group[first], first, np.diff(np.append(first, head_groups.count))
    )


def _runs(
    plan: PoolPlan, worker: NDArray[np.int32], at_home: BoolArray
) -> tuple[BoolArray, IntArray]:
    """Whether each (visit, shard) opens a segment, and the last visit of the segment that it opens.

    A visit continues the one before it where both are of one sample, at one worker, side by side in
    the rows of the q buffer: rows of one home always, fetched rows if no other head_group or tile lies
    between.
    """
    geometry, head_groups = plan.geometry, plan.head_groups
    block_samples = geometry.block_samples
    count = len(block_samples.first)
    length = block_samples.stop - block_samples.start
    into_block = block_samples.start - geometry.block_start[block_samples.first]
    row = geometry.block_local[block_samples.first] + into_block

    continues = np.zeros((count, head_groups.shards), dtype=np.bool_)
    beside = row[1:] == row[:-1] + length[:-1]
    continues[1:] = at_home[1:] & at_home[:-1] & beside[:, None]
    if head_groups.per_chunk == 1:
        fetched = _fetched_rows(plan)[block_samples.first] + into_block[:, None]
        beside = fetched[1:] == fetched[:-1] + length[:-1, None]
        continues[1:] |= ~at_home[1:] & ~at_home[:-1] & beside
    continues[1:] &= worker[1:] == worker[:-1]
    same = (block_samples.second[1:] == block_samples.second[:-1]) & (
        block_samples.start[1:] == block_samples.stop[:-1]
    )
    continues[1:] &= same[:, None]

    opens = ~continues
    following = np.where(opens, np.arange(count)[:, None], count)
    following = np.minimum.accumulate(following[::-1], axis=0)[::-1]  # itself where it opens one
    last = np.full((count, head_groups.shards), count - 1, dtype=np.int64)
    last[:-1] = following[1:] - 1
    return opens, last


def _fetched_rows(plan: PoolPlan) -> IntArray:
    """Row of each moved tile in the order in which Q arrives, [blocks, shards].

    Counted through the pool: only rows of one worker may be compared.
    """
    geometry, shards = plan.geometry, plan.head_groups.shards
    home = np.repeat(geometry.block_worker, shards)
    rows = np.repeat(geometry.block_stop - geometry.block_start, shards)
    moved = np.flatnonzero((home != plan.assignment) & (rows > 0))
    key = plan.assignment[moved].astype(np.int64) * plan.workers + home[moved]
    moved = moved[np.argsort(key, kind="stable")]
    first = np.zeros(len(home), dtype=np.int64)
    first[moved] = np.cumsum(rows[moved]) - rows[moved]
    return first.reshape(-1, shards)


def _lane_runs(
    visit: IntArray, column: IntArray, last: IntArray, columns: _Columns, head_groups: HeadGroups
) -> tuple[IntArray, IntArray, IntArray]:
    """Local segments of equal rows joined over neighbouring head_groups.

    Takes them by visit, then column; returns (index of a column that has the segment's rows, first
    head_group, head_groups) of each segment.  A run that would tear a query group stays in single head_groups.
    """
    opens = np.ones(len(visit), dtype=np.bool_)
    opens[1:] = (
        (visit[1:] != visit[:-1]) | (column[1:] != column[:-1] + 1) | (last[1:] != last[:-1])
    )
    first = np.flatnonzero(opens)
    final = np.append(first[1:], len(opens))[: len(first)] - 1
    head_group = columns.head_group[column[first]]
    width = columns.head_group[column[final]] + columns.head_groups[column[final]] - head_group
    from_head, to_head = head_group * head_groups.heads, (head_group + width) * head_groups.heads
    whole_groups = (from_head % head_groups.group == 0) & (to_head % head_groups.group == 0)
    one_group = from_head // head_groups.group == (to_head - 1) // head_groups.group
    joins = whole_groups | one_group
    count = np.where(joins, 1, width)
    return (
        np.repeat(first, count),
        spread(head_group, count),
        np.repeat(np.where(joins, width, 1), count),
    )
