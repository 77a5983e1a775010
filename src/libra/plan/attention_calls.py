"""Kernel calls: which query rows attend to which key rows, on every worker of a pool.

A *segment* is a run of query rows of one sample, for some neighbouring heads, and the key rows that
these queries see: all of the sample up to the last query.

              k_start                       k_start + k_len
                 |<------- prefix ------->|<- q_len ->|
      q_start    | 1 1 1 1 1 1 1 1 1 1 1 1 1          |
                 | 1 1 1 1 1 1 1 1 1 1 1 1 1 1        |     bottom-right aligned causal mask
                 | 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1      |
      + q_len    | 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1|

`pool_segments` lists the segments of all workers at once.  Segments that continue each other are one
segment:

    blocks of one sample, one head group        rows  [0, 4) [4, 8) [8, 12)   ->  rows [0, 12)
    head groups of the same rows, all local     heads 0-1    2-3    4-5       ->  heads 0-5

`worker_calls` groups one worker's segments by the buffers that they read: one kernel call each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import causal_pairs
from libra.plan.geometry import range_starts, spread
from libra.plan.head_groups import HeadGroups
from libra.plan.pool_plan import PoolPlan

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

LOCAL = -1
"""In place of a chunk: the worker's own tensors, or work that waits for no transfer."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One kernel call: segments that read one q buffer and one kv buffer.

    The arrays are int64 [segments].  `q_len >= 1`, and `k_len >= q_len`, or `k_len >= 1` where not
    causal.  Every segment has the same head width.  Several segments may read one range of keys;
    each query row and head belongs to exactly one segment.
    """

    q_start: IntArray
    q_len: IntArray
    k_start: IntArray
    k_len: IntArray
    q_head: IntArray
    """First query head in the q buffer."""
    kv_head: IntArray
    """First key/value head in the k and v buffers."""
    heads: int
    """Query heads of every segment."""
    kv_heads: int
    """Key/value heads of every segment; query head i of a segment reads its key/value head i //
    (heads / kv_heads).
    """
    causal: bool = True
    """False: every query row of a segment sees all its keys, as between the shards of a ring."""
    chunk: int = LOCAL
    """The call runs once this chunk has arrived; LOCAL runs at once."""
    q_buffer: int = LOCAL
    """Chunk whose fetched Q it reads, or LOCAL."""
    kv_buffer: int = LOCAL
    """Chunk whose fetched K and V it reads, or LOCAL."""

    def __len__(self) -> int:
        return len(self.q_start)

    @property
    def lse_size(self) -> int:
        """Elements of the flat LSE: segment-major, then head, then row."""
        return int(self.q_len.sum()) * self.heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolSegments:
    """Kernel segments of several workers, in no particular order; int64 [segments] each."""

    worker: IntArray
    chunk: IntArray
    """Chunk whose arrival the segment waits for; LOCAL waits for no transfer."""
    q_buffer: IntArray
    """Chunk whose fetched Q it reads, or LOCAL."""
    kv_buffer: IntArray
    """Chunk whose fetched K and V it reads, or LOCAL."""
    q_start: IntArray
    """First row in the q buffer."""
    q_len: IntArray
    k_start: IntArray
    """First row in the k and v buffers."""
    k_len: IntArray
    head_group: IntArray
    """First head group."""
    heads: IntArray
    """Query heads."""
    kv_heads: IntArray

    def __len__(self) -> int:
        return len(self.worker)

    @property
    def pairs(self) -> IntArray:
        """Query-key pairs times heads."""
        return causal_pairs(self.k_len - self.q_len, self.k_len) * self.heads


def worker_calls(plan: PoolPlan, worker: int) -> tuple[AttentionCall, ...]:
    """One worker's kernel calls in the order in which they run: local ones, then chunk by chunk."""
    segments, head_groups = pool_segments(plan, worker), plan.head_groups
    key = np.stack(
        [
            segments.chunk,
            segments.q_buffer,
            segments.kv_buffer,
            segments.heads,
            segments.kv_heads,
        ],
        axis=1,
    )
    kinds, kind = np.unique(key, axis=0, return_inverse=True)
    order = np.lexsort((segments.q_start, segments.head_group, kind.ravel()))
    ends = np.cumsum(np.bincount(kind.ravel(), minlength=len(kinds)))
    calls = []
    for (chunk, q_buffer, kv_buffer, heads, kv_heads), rows in zip(
        kinds.tolist(), np.split(order, ends[:-1]), strict=False
    ):
        # A fetched buffer holds one head group a row, so its only head is number 0.
        head_group = segments.head_group[rows]
        q_head = head_group * head_groups.heads * (q_buffer == LOCAL)
        kv_head = head_groups.kv_head_group(head_group) * head_groups.kv_heads
        calls.append(
            AttentionCall(
                q_start=segments.q_start[rows],
                q_len=segments.q_len[rows],
                k_start=segments.k_start[rows],
                k_len=segments.k_len[rows],
                q_head=q_head,
                kv_head=kv_head * (kv_buffer == LOCAL),
                heads=heads,
                kv_heads=kv_heads,
                chunk=chunk,
                q_buffer=q_buffer,
                kv_buffer=kv_buffer,
            )
        )
    return tuple(calls)


def pool_segments(plan: PoolPlan, worker: int | None = None) -> PoolSegments:
    """The kernel segments of all workers, or of one."""
    geometry, head_groups, fetches = plan.geometry, plan.head_groups, plan.kv_fetches
    visits, columns = geometry.block_samples, _columns(head_groups)
    tile_worker = plan.assignment.reshape(-1, head_groups.shards)[visits.left]
    at_home = tile_worker == geometry.block_worker[visits.left][:, None]

    # Step 1: join blocks.  A visit is (block, sample); `last` is the last visit of each segment.
    opens, last = _join_blocks(plan, tile_worker, at_home)
    if worker is not None:
        opens = opens & (tile_worker == worker)
    visit, column = np.nonzero(opens[:, columns.shard])  # ordered by visit, then head group
    shard = columns.shard[column]
    last = last[visit, shard]
    sample, block = visits.right[visit], visits.left[visit]
    who = tile_worker[visit, shard].astype(np.int64)
    fetch = fetches.find(who, sample, columns.kv_head_group[column], head_groups)
    home, resident = at_home[visit, shard], fetches.resident[fetch]

    # Step 2: one segment for each run of local head groups, one for each head group that waits.
    local, waits = np.flatnonzero(home & resident), np.flatnonzero(~(home & resident))
    joined, joined_group, width = _join_head_groups(
        visit[local], column[local], last[local], columns, head_groups
    )
    count = columns.count[column[waits]]
    each = np.concatenate([local[joined], np.repeat(waits, count)])
    head_group = np.concatenate([joined_group, spread(columns.head_group[column[waits]], count)])
    width = np.concatenate([width, np.ones(count.sum(), dtype=np.int64)])

    # Step 3: rows.  In a fetched q buffer the head groups of a tile's chunk follow each other.
    into_block = visits.start[visit] - geometry.block_start[block]
    q_row = np.where(home, geometry.block_local[block], _fetched_rows(plan)[block, shard])
    rows = (geometry.block_stop - geometry.block_start)[block]
    chunk, home, resident = head_groups.chunk(head_group), home[each], resident[each]
    q_start = (q_row + into_block)[each] + np.where(
        home, 0, head_group % head_groups.per_chunk * rows[each]
    )
    k_start = np.where(fetches.resident, _resident_rows(plan), plan.kv_buffer_rows.start)
    last_kv = head_groups.kv_head_group(head_group + width - 1)
    kv_groups = last_kv - head_groups.kv_head_group(head_group) + 1
    return PoolSegments(
        worker=who[each],
        chunk=np.where(home & resident, LOCAL, chunk),
        q_buffer=np.where(home, LOCAL, chunk),
        kv_buffer=np.where(resident, LOCAL, fetches.chunk[fetch[each]]),
        q_start=q_start,
        q_len=(visits.stop[last] - visits.start[visit])[each],
        k_start=k_start[fetch[each]],
        k_len=(visits.stop[last] - geometry.sample_start[sample])[each],
        head_group=head_group,
        heads=width * head_groups.heads,
        kv_heads=kv_groups * head_groups.kv_heads,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Head groups of one head shard that read one kv head group, in order; int64 [columns].

    With 8 head groups, 2 shards and 4 kv head groups a column is 2 head groups: within a column all
    segments have the same rows, and differ only in the chunk that they wait for.
    """

    shard: IntArray
    kv_head_group: IntArray
    head_group: IntArray
    """First head group."""
    count: IntArray
    """How many head groups."""


def _columns(head_groups: HeadGroups) -> _Columns:
    head_group = np.arange(head_groups.count, dtype=np.int64)
    shard, kv = head_group // head_groups.per_shard, head_groups.kv_head_group(head_group)
    opens = np.ones(head_groups.count, dtype=np.bool_)
    opens[1:] = (shard[1:] != shard[:-1]) | (kv[1:] != kv[:-1])
    first = np.flatnonzero(opens)
    return _Columns(shard[first], kv[first], first, np.diff(np.append(first, head_groups.count)))


def _join_blocks(
    plan: PoolPlan, tile_worker: NDArray[np.int32], at_home: BoolArray
) -> tuple[BoolArray, IntArray]:
    """Whether each visit opens a segment for a head shard, and the last visit of the segment that it
    opens; [visits, shards] each.

    A visit continues the one before it where both belong to one sample and one worker, and their
    rows follow each other in the q buffer.  Rows at home do, unless zigzag parts them.  Fetched rows
    do only if no other head group or tile lies between.
    """
    geometry, head_groups = plan.geometry, plan.head_groups
    visits = geometry.block_samples
    count, length = len(visits.left), visits.stop - visits.start
    into_block = visits.start - geometry.block_start[visits.left]
    row = geometry.block_local[visits.left] + into_block

    # Step 1: whether the rows of a visit follow those of the visit before it.
    continues = np.zeros((count, head_groups.shards), dtype=np.bool_)
    follows = row[1:] == row[:-1] + length[:-1]
    continues[1:] = at_home[1:] & at_home[:-1] & follows[:, None]
    if head_groups.per_chunk == 1:
        fetched = _fetched_rows(plan)[visits.left] + into_block[:, None]
        follows = fetched[1:] == fetched[:-1] + length[:-1, None]
        continues[1:] |= ~at_home[1:] & ~at_home[:-1] & follows
    continues[1:] &= tile_worker[1:] == tile_worker[:-1]
    one_sample = (visits.right[1:] == visits.right[:-1]) & (visits.start[1:] == visits.stop[:-1])
    continues[1:] &= one_sample[:, None]

    # Step 2: a segment lasts until the next visit that opens one.  Visits that open, 0 2 3 of 5:
    #     opens  0  .  2  3  .      next opening at or after  0 2 2 3 5      last  1 . 2 4 .
    opens = ~continues
    following = np.where(opens, np.arange(count)[:, None], count)
    following = np.minimum.accumulate(following[::-1], axis=0)[::-1]
    last = np.full((count, head_groups.shards), count - 1, dtype=np.int64)
    last[:-1] = following[1:] - 1
    return opens, last


def _join_head_groups(
    visit: IntArray, column: IntArray, last: IntArray, columns: _Columns, head_groups: HeadGroups
) -> tuple[IntArray, IntArray, IntArray]:
    """Join local segments of the same rows over neighbouring head groups.

    Takes a segment of each column, ordered by visit, then column.  Returns, for each joined segment,
    (index of one that has its rows, first head group, number of head groups).  Head groups whose
    run would split a query group stay single.
    """
    opens = np.ones(len(visit), dtype=np.bool_)
    opens[1:] = (
        (visit[1:] != visit[:-1]) | (column[1:] != column[:-1] + 1) | (last[1:] != last[:-1])
    )
    first = np.flatnonzero(opens)
    final = np.append(first[1:], len(opens))[: len(first)] - 1
    head_group = columns.head_group[column[first]]
    width = columns.head_group[column[final]] + columns.count[column[final]] - head_group
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


def _fetched_rows(plan: PoolPlan) -> IntArray:
    """Row at which each moved tile starts in the q buffer of every chunk, [blocks, shards].

    Tiles arrive ordered by their home, then by ID, each with `per_chunk` head groups.
    """
    geometry, head_groups = plan.geometry, plan.head_groups
    home = np.repeat(geometry.block_worker, head_groups.shards)
    rows = np.repeat(geometry.block_stop - geometry.block_start, head_groups.shards)
    moved = np.flatnonzero((home != plan.assignment) & (rows > 0))
    key = plan.assignment[moved].astype(np.int64) * plan.workers + home[moved]
    moved = moved[np.argsort(key, kind="stable")]
    start = np.full(len(home), -1, dtype=np.int64)
    start[moved] = range_starts(rows[moved] * head_groups.per_chunk, plan.assignment[moved])
    return start.reshape(-1, head_groups.shards)


def _resident_rows(plan: PoolPlan) -> IntArray:
    """Local row of the sample's first token, for fetches whose worker holds all rows; [fetches]."""
    geometry, fetches = plan.geometry, plan.kv_fetches
    fragment = geometry.sample_shards.right[fetches.shard_first]
    into_fragment = geometry.sample_start[fetches.sample] - geometry.fragment_start[fragment]
    return np.asarray(geometry.fragment_local[fragment] + into_fragment)
