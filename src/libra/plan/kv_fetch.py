"""Which K and V rows each worker fetches, where they come from, and where they lie once arrived.

A *KV fetch* is (worker, sample, kv head group): rows [0, length) of the sample, once for a worker
however many tiles read them.

    sample          | shard at worker 0 | shard at worker 1 | shard at worker 2 |
    KV fetch of 1   |<------------------- length ------>|
    its transfers   | 0 -> 1            | own rows      |

A worker that holds all rows of a fetch itself reads them where they are: the fetch is *resident*.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import IntArray
from libra.plan.geometry import Columns, Geometry, range_starts, scatter_add, spread
from libra.plan.head_groups import HeadGroups


@dataclass(frozen=True, slots=True, eq=False)
class KVFetches(Columns):
    """All KV fetches of a pool, ordered by (worker, sample, kv head group); int64 [fetches]."""

    worker: IntArray
    sample: IntArray
    kv_head_group: IntArray
    length: IntArray
    """Rows from the sample's first."""
    chunk: IntArray
    """First chunk that reads them, with which they travel."""
    resident: NDArray[np.bool_]
    """Whether the worker itself holds all these rows, in one run."""
    shard_first: IntArray
    """First entry of the fetch in `Geometry.sample_shards`."""
    shard_count: IntArray
    """Entries that cover its rows."""

    def find(
        self, worker: IntArray, sample: IntArray, kv_head_group: IntArray, head_groups: HeadGroups
    ) -> IntArray:
        """Index of each (worker, sample, kv head group)."""
        samples = 1 + max(int(self.sample.max(initial=0)), int(sample.max(initial=0)))
        # One ascending number for each (worker, sample, kv head group).
        key = (self.worker * samples + self.sample) * head_groups.kv_count + self.kv_head_group
        return np.searchsorted(
            key, (worker * samples + sample) * head_groups.kv_count + kv_head_group
        )


def pool_kv_fetches(
    geometry: Geometry,
    assignment: NDArray[np.int32],
    head_groups: HeadGroups,
    *,
    complete_groups: bool,
) -> KVFetches:
    """The KV fetches that follow from an assignment of tiles; with `complete_groups` every sample
    that a tile reads is fetched whole.
    """
    # Step 1: one row for each (block, sample) and one column for each kv head group that a head
    # shard reads, with the first chunk that reads it.
    visits = geometry.block_samples
    start, stop = geometry.sample_start[visits.right], geometry.sample_stop[visits.right]
    length = (stop if complete_groups else visits.stop) - start
    columns = head_groups.kv_columns()
    worker = assignment.reshape(-1, head_groups.shards)[visits.left].astype(np.int64)

    # Step 2: sort by (worker, sample, kv head group) in one key; equal keys are one fetch, which
    # takes the longest prefix and the earliest chunk.
    samples, kv_count = len(geometry.sample_start), head_groups.kv_count
    key = worker[:, columns.shard] * samples + visits.right[:, None]
    key = key * kv_count + columns.kv_head_group
    table, order = key.shape, np.argsort(key, axis=None, kind="stable")
    key = key.ravel()[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    length = np.broadcast_to(length[:, None], table).ravel()[order]
    chunk = np.broadcast_to(head_groups.chunk(columns.head_group), table).ravel()[order]
    if len(first):  # a pool of padding has none
        length, chunk = np.maximum.reduceat(length, first), np.minimum.reduceat(chunk, first)
    group, kv_head_group = np.divmod(key[first], kv_count)
    fetch_worker, sample = np.divmod(group, samples)

    # Step 3: the shards of a sample that a prefix covers.  They ascend over the whole pool.
    held = geometry.sample_shards
    shard_first = np.searchsorted(held.left, np.arange(samples))[sample]
    shard_end = np.searchsorted(held.start, geometry.sample_start[sample] + length, side="left")
    holder = geometry.fragment_worker[held.right[shard_first]]
    return KVFetches(
        worker=fetch_worker,
        sample=sample,
        kv_head_group=kv_head_group,
        length=length,
        chunk=chunk,
        resident=(shard_end - shard_first == 1) & (holder == fetch_worker),
        shard_first=shard_first,
        shard_count=shard_end - shard_first,
    )


@dataclass(frozen=True, slots=True, eq=False)
class KVTransfers(Columns):
    """Runs of rows of one kv head group, ordered by (chunk, hop, destination, source, sample, kv
    head group, position); int64 [runs].

    In the first hop rows come from the worker that holds them; in the second from one that has
    received them and passes them on.
    """

    fetch: IntArray
    source: IntArray
    destination: IntArray
    """The same as the source for rows that the fetching worker holds itself."""
    chunk: IntArray
    kv_head_group: IntArray
    source_row: IntArray
    """First local row at the worker that holds them; -1 in the second hop."""
    length: IntArray
    offset: IntArray
    """First row of the run within its fetch."""
    via: IntArray
    """In the second hop, the run of the first that brings its rows to the source, the same row
    first; -1 in the first hop.
    """

    @property
    def passed_on(self) -> NDArray[np.bool_]:
        """Whether a run travels in the second hop."""
        return self.via >= 0

    def concatenate(self, other: KVTransfers) -> KVTransfers:
        """These runs, then those of another."""
        names = [field.name for field in fields(self)]
        return KVTransfers(*(np.append(getattr(self, n), getattr(other, n)) for n in names))

    def rows(self, workers: int, chunks: int) -> IntArray:
        """Rows of kv head groups from worker i to j, int64 [2 hops, chunks, workers, workers]."""
        away = np.flatnonzero(self.source != self.destination)
        hop = self.passed_on.astype(np.int64)
        at = tuple(column[away] for column in (hop, self.chunk, self.source, self.destination))
        return scatter_add((2, chunks, workers, workers), at, self.length[away])


def kv_transfers(geometry: Geometry, fetches: KVFetches) -> KVTransfers:
    """The runs that bring every fetch that is not resident, straight from the workers that hold
    them; the fetching worker's own rows are among them.
    """
    # One run for each fragment that holds rows of a fetch; the last one ends with the prefix.
    wanted = np.flatnonzero(~fetches.resident)
    fetch = np.repeat(wanted, fetches.shard_count[wanted])
    shard = spread(fetches.shard_first[wanted], fetches.shard_count[wanted])
    held = geometry.sample_shards
    fragment, start = held.right[shard], held.start[shard]
    origin = geometry.sample_start[fetches.sample[fetch]]
    stop = np.minimum(held.stop[shard], origin + fetches.length[fetch])
    direct = KVTransfers(
        fetch=fetch,
        source=geometry.fragment_worker[fragment],
        destination=fetches.worker[fetch],
        chunk=fetches.chunk[fetch],
        kv_head_group=fetches.kv_head_group[fetch],
        source_row=geometry.fragment_local[fragment] + start - geometry.fragment_start[fragment],
        length=stop - start,
        offset=start - origin,
        via=np.full_like(fetch, -1),
    )
    return in_order(direct, fetches)


def in_order(runs: KVTransfers, fetches: KVFetches) -> KVTransfers:
    """The same runs in the order in which both sides of an exchange expect them."""
    key = (2 * runs.chunk + runs.passed_on) * (1 + int(fetches.worker.max(initial=0)))
    key = (key + runs.destination) * (1 + int(runs.source.max(initial=0))) + runs.source
    # The fetches of one destination are ordered by sample and kv head group.
    order = np.lexsort((runs.offset, key * len(fetches.worker) + runs.fetch))
    # Runs have moved: `via` follows the run that it names.
    now = np.empty_like(order)
    now[order] = np.arange(len(order))
    ordered = runs.take(order)
    return replace(ordered, via=np.where(ordered.passed_on, now[ordered.via], -1))


@dataclass(frozen=True, slots=True, eq=False)
class KVBufferRows:
    """Where K and V lie at the workers that fetch them.

        arrive in     | from holders | passed on | own rows |
        kv buffer     | fetch | fetch | fetch | ...         |     the same rows, fetch by fetch

    Fetches lie in the order in which their first row arrives, so that rows which arrive in order
    need not be permuted.
    """

    arrival: IntArray
    """Of each run, the place of its first row among the rows of its chunk and worker as they
    arrive, [runs].
    """
    buffer: IntArray
    """Of each run, the row of the kv buffer in which its first row belongs, [runs]."""
    start: IntArray
    """First row of each fetch in its kv buffer, -1 where it is resident, [fetches]."""


def kv_buffer_rows(runs: KVTransfers, fetches: KVFetches, workers: int) -> KVBufferRows:
    """Lay out all kv buffers of a pool, one for each chunk and worker."""
    # Step 1: rows arrive hop by hop, in the order of the runs; own rows follow.
    own = runs.source == runs.destination
    kv_buffer = runs.chunk * workers + runs.destination
    order = np.lexsort((own, kv_buffer))  # runs of one hop stay in their order
    arrival = np.empty_like(order)
    arrival[order] = range_starts(runs.length[order], kv_buffer[order])

    # Step 2: fetches lie in the order of their first run.
    fetch, first = np.unique(runs.fetch[order], return_index=True)
    fetch = fetch[np.argsort(first)]
    start = np.full(len(fetches.worker), -1, dtype=np.int64)
    start[fetch] = range_starts(
        fetches.length[fetch], fetches.chunk[fetch] * workers + fetches.worker[fetch]
    )
    return KVBufferRows(arrival=arrival, buffer=start[runs.fetch] + runs.offset, start=start)
