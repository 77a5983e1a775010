"""Kernel calls: which query rows attend to which key rows, on every worker of a pool.

A *segment* is a run of query rows of one sample, for some neighbouring heads, and the key rows that
these queries see: all of the sample up to the last query.

              k_start                       k_start + k_len
                 |<------- prefix ------->|<- q_len ->|
      q_start    | 1 1 1 1 1 1 1 1 1 1 1 1 1          |
                 | 1 1 1 1 1 1 1 1 1 1 1 1 1 1        |     bottom-right aligned causal mask
                 | 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1      |
      + q_len    | 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1|

`pool_segments` lists the segments of all workers at once.  Segments that continue each other are
one segment:

    blocks of one sample, one head group        rows  [0, 4) [4, 8) [8, 12)   ->  rows [0, 12)
    head groups of the same rows, all local     heads 0-1    2-3    4-5       ->  heads 0-5

`worker_calls` groups one worker's segments by the buffers that they read: one kernel call each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import IntArray, causal_pairs
from libra.plan.geometry import Columns, differs, range_starts, run_bounds, spread
from libra.plan.head_groups import HeadGroups, KVColumns
from libra.plan.pool_plan import PoolPlan

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

    @property
    def pairs(self) -> int:
        """Query-key pairs of all segments, times heads."""
        first = self.k_len - self.q_len
        pairs = causal_pairs(first, self.k_len) if self.causal else self.q_len * self.k_len
        return int(pairs.sum()) * self.heads


@dataclass(frozen=True, slots=True, eq=False)
class PoolSegments(Columns):
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

    @property
    def pairs(self) -> IntArray:
        """Query-key pairs times heads."""
        return causal_pairs(self.k_len - self.q_len, self.k_len) * self.heads

    def calls(self) -> tuple[IntArray, BoolArray]:
        """The order of the segments call by call, and which of them then begin one: a kernel call
        is a worker's segments of equal buffers and head width, in order of head groups and rows.
        """
        call = self.worker, self.chunk, self.q_buffer, self.kv_buffer, self.heads, self.kv_heads
        order = np.lexsort((self.q_start, self.head_group, *reversed(call)))
        opens = np.any([differs(column[order]) for column in call], axis=0)
        return order, opens


def worker_calls(plan: PoolPlan, worker: int) -> tuple[AttentionCall, ...]:
    """One worker's kernel calls in the order in which they run: local ones, then chunk by chunk."""
    head_groups, segments = plan.head_groups, pool_segments(plan, worker)
    order, opens = segments.calls()
    segments = segments.take(order)
    # A fetched buffer holds one head group a row, so its only head is number 0.
    kv_head = head_groups.kv_head_group(segments.head_group) * head_groups.kv_heads
    kv_head *= segments.kv_buffer == LOCAL
    q_head = segments.head_group * head_groups.heads * (segments.q_buffer == LOCAL)
    calls = []
    for first, last in zip(*run_bounds(opens), strict=True):
        rows = slice(first, last + 1)
        calls.append(
            AttentionCall(
                q_start=segments.q_start[rows],
                q_len=segments.q_len[rows],
                k_start=segments.k_start[rows],
                k_len=segments.k_len[rows],
                q_head=q_head[rows],
                kv_head=kv_head[rows],
                heads=int(segments.heads[first]),
                kv_heads=int(segments.kv_heads[first]),
                chunk=int(segments.chunk[first]),
                q_buffer=int(segments.q_buffer[first]),
                kv_buffer=int(segments.kv_buffer[first]),
            )
        )
    return tuple(calls)


def pool_segments(plan: PoolPlan, worker: int | None = None) -> PoolSegments:
    """The kernel segments of all workers, or of one."""
    geometry, head_groups, fetches = plan.geometry, plan.head_groups, plan.kv_fetches
    visits, columns = geometry.block_samples, head_groups.kv_columns()

    # Step 1: join blocks.  A run is neighbouring blocks of one sample and head shard at one worker.
    runs = _join_blocks(plan)
    if worker is not None:
        runs = runs.take(np.flatnonzero(runs.worker == worker))

    # Step 2: a run for each kv head group that its shard reads, by first block, then column.
    per_shard = np.bincount(columns.shard)
    count = per_shard[runs.shard]
    column = spread((np.cumsum(per_shard) - per_shard)[runs.shard], count)
    run = np.repeat(np.arange(len(count)), count)
    order = np.lexsort((column, runs.first[run]))
    runs, column = runs.take(run[order]), column[order]
    sample = visits.right[runs.first]
    fetch = fetches.find(runs.worker, sample, columns.kv_head_group[column], head_groups)
    resident = fetches.resident[fetch]

    # Step 3: one segment for each run of local head groups, one for each head group that waits.
    # A segment that reads fetched rows waits for the chunk of its head group.
    local, waits = np.flatnonzero(runs.home & resident), np.flatnonzero(~(runs.home & resident))
    joined, joined_group, width = _join_head_groups(
        runs.take(local), column[local], columns, head_groups
    )
    count = columns.count[column[waits]]
    each = np.concatenate([local[joined], np.repeat(waits, count)])
    head_group = np.concatenate([joined_group, spread(columns.head_group[column[waits]], count)])
    width = np.concatenate([width, np.ones(count.sum(), dtype=np.int64)])

    # Step 4: rows.  In a fetched q buffer the head groups of a tile's chunk follow each other.
    runs, fetch, resident = runs.take(each), fetch[each], resident[each]
    chunk = head_groups.chunk(head_group)
    block, start = visits.left[runs.first], geometry.sample_start[sample[each]]
    tile_rows = geometry.block_stop[block] - geometry.block_start[block]
    behind = np.where(runs.home, 0, head_group % head_groups.per_chunk * tile_rows)
    k_start = np.where(fetches.resident, _resident_rows(plan), plan.kv_buffer_rows.start)
    kv_group, last_kv_group = map(head_groups.kv_head_group, (head_group, head_group + width - 1))
    return PoolSegments(
        worker=runs.worker,
        chunk=np.where(runs.home & resident, LOCAL, chunk),
        q_buffer=np.where(runs.home, LOCAL, chunk),
        kv_buffer=np.where(resident, LOCAL, fetches.chunk[fetch]),
        q_start=runs.q_row + behind,
        q_len=visits.stop[runs.last] - visits.start[runs.first],
        k_start=k_start[fetch],
        k_len=visits.stop[runs.last] - start,
        head_group=head_group,
        heads=width * head_groups.heads,
        kv_heads=(last_kv_group - kv_group + 1) * head_groups.kv_heads,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Runs(Columns):
    """Rows that continue each other for one head shard; int64 [runs].

    A *visit* is a block and a sample that it holds rows of, an entry of `Geometry.block_samples`.
    """

    worker: IntArray
    shard: IntArray
    first: IntArray
    """First visit."""
    last: IntArray
    """Last visit."""
    home: BoolArray
    """Whether the worker holds the rows of Q itself."""
    q_row: IntArray
    """First row in the q buffer, of the first head group of a chunk."""


def _join_blocks(plan: PoolPlan) -> _Runs:
    """Join visits, shard by shard, where one continues the one before it.

    Both must belong to one sample and one worker, and their rows must follow each other in the q
    buffer.  Rows at home do, unless zigzag parts them.  Fetched rows do only if no other head group
    or tile lies between.
    """
    geometry, shards = plan.geometry, plan.head_groups.shards
    visits = geometry.block_samples
    block, count = visits.left, len(visits.left)
    # Step 1: a table of all (shard, visit), flat, shard by shard.
    visit = np.tile(np.arange(count), shards)
    worker = plan.assignment.reshape(-1, shards)[block].T.ravel().astype(np.int64)
    home = worker == np.tile(geometry.block_worker[block], shards)
    local_row = np.tile(geometry.block_local[block], shards)
    into_block = np.tile(visits.start - geometry.block_start[block], shards)
    q_row = into_block + np.where(home, local_row, _fetched_rows(plan)[block].T.ravel())

    # Step 2: whether an entry opens a run, or continues the one before it.
    start, stop = visits.start[visit], visits.stop[visit]
    opens = differs(worker) | differs(home) | differs(visits.right[visit])
    opens |= (start != np.roll(stop, 1)) | (q_row != np.roll(q_row + stop - start, 1))
    if plan.head_groups.per_chunk > 1:
        opens |= ~home
    first, last = run_bounds(opens)
    return _Runs(
        worker[first], first // max(count, 1), visit[first], visit[last], home[first], q_row[first]
    )


def _join_head_groups(
    runs: _Runs, column: IntArray, columns: KVColumns, head_groups: HeadGroups
) -> tuple[IntArray, IntArray, IntArray]:
    """Join local runs of the same rows over neighbouring head groups.

    Takes a run of each column, ordered by first visit, then column.  Returns, for each joined
    segment, (index of a run that has its rows, first head group, number of head groups).  Head
    groups that would together split a query group stay single.
    """
    opens = differs(runs.first) | differs(runs.last) | (column != np.roll(column, 1) + 1)
    first, final = run_bounds(opens)
    # A run of columns is one segment if it has whole query groups, or heads of one group: query
    # head i of a segment then reads key/value head i // (heads / kv_heads).
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
    home, rows = plan.tile_home, plan.tile_rows
    moved = np.flatnonzero((home != plan.assignment) & (rows > 0))
    key = plan.assignment[moved].astype(np.int64) * plan.workers + home[moved]
    moved = moved[np.argsort(key, kind="stable")]
    start = np.full(len(home), -1, dtype=np.int64)
    start[moved] = range_starts(rows[moved] * plan.head_groups.per_chunk, plan.assignment[moved])
    return start.reshape(-1, plan.shards)


def _resident_rows(plan: PoolPlan) -> IntArray:
    """Local row of the sample's first token, for fetches whose worker holds all rows; [fetches]."""
    geometry, fetches = plan.geometry, plan.kv_fetches
    fragment = geometry.sample_shards.right[fetches.shard_first]
    into_fragment = geometry.sample_start[fetches.sample] - geometry.fragment_start[fragment]
    return np.asarray(geometry.fragment_local[fragment] + into_fragment)
