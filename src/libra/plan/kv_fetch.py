"""Which K and V rows each worker needs, and where they come from.

A *need* is (worker, sample, kv head_group): rows [0, length) of the sample, once per worker however many
tiles read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.geometry import Geometry, spread
from libra.plan.head_groups import HeadGroups

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KVFetches:
    """All needs of a pool, ordered by (worker, sample, kv head_group); int64 [needs]."""

    worker: IntArray
    sample: IntArray
    kv_head_group: IntArray
    length: IntArray
    """Rows from the sample's first."""
    chunk: IntArray
    """First chunk that reads it."""
    resident: NDArray[np.bool_]
    """The worker holds all these rows side by side already."""
    piece_first: IntArray
    """First entry of the need in `Geometry.sample_shards`."""
    piece_count: IntArray
    """Entries that cover its rows."""

    def find(
        self, worker: IntArray, sample: IntArray, kv_head_group: IntArray, head_groups: HeadGroups
    ) -> IntArray:
        """Index of each (worker, sample, kv head_group)."""
        samples = 1 + max(int(self.sample.max(initial=0)), int(sample.max(initial=0)))
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
    """Needs that follow from a placement; with `complete_groups` every touched sample is needed
    whole.
    """
    shards, chunks = head_groups.shards, head_groups.chunks
    # One row per (visit, shard): the worker that computes it, and the kv head_groups the shard touches.
    visit = geometry.block_samples
    worker = assignment.reshape(-1, shards)[visit.first].astype(np.int64)
    start, stop = geometry.sample_start[visit.second], geometry.sample_stop[visit.second]
    length = (stop if complete_groups else visit.stop) - start

    head_group = np.arange(head_groups.count, dtype=np.int64)
    pairs = np.unique(
        np.stack([head_group // head_groups.per_shard, head_groups.kv_head_group(head_group)]),
        axis=1,
    )
    first_chunk = np.full((shards, head_groups.kv_count), chunks, dtype=np.int64)
    np.minimum.at(
        first_chunk,
        (head_group // head_groups.per_shard, head_groups.kv_head_group(head_group)),
        head_groups.chunk(head_group),
    )
    shard, kv_head_group = pairs

    samples = len(geometry.sample_start)
    key = (
        worker[:, shard] * samples + visit.second[:, None]
    ) * head_groups.kv_count + kv_head_group
    order = np.argsort(key, axis=None, kind="stable")
    key = key.ravel()[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    rows = np.broadcast_to(length[:, None], (len(length), len(shard))).ravel()[order]
    chunk = np.broadcast_to(first_chunk[shard, kv_head_group], (len(length), len(shard))).ravel()[
        order
    ]
    key = key[first]
    sample = key // head_groups.kv_count % samples
    need_worker = key // head_groups.kv_count // samples
    need_length = np.maximum.reduceat(rows, first) if len(first) else rows
    need_chunk = np.minimum.reduceat(chunk, first) if len(first) else chunk

    pieces = geometry.sample_shards
    piece_offset = np.searchsorted(pieces.first, np.arange(samples))
    piece_first = piece_offset[sample]
    sample_end = geometry.sample_start[sample] + need_length
    covered = np.searchsorted(
        pieces.start, sample_end, side="left"
    )  # pieces ascend over the whole pool
    holder = geometry.fragment_worker[pieces.second[piece_first]]
    return KVFetches(
        worker=need_worker,
        sample=sample,
        kv_head_group=key % head_groups.kv_count,
        length=need_length,
        chunk=need_chunk,
        resident=(covered - piece_first == 1) & (holder == need_worker),
        piece_first=piece_first,
        piece_count=covered - piece_first,
    )


@dataclass(frozen=True, slots=True, eq=False)
class KVTransfers:
    """Runs of rows of one kv head_group, ordered by (chunk, hop, destination, source, sample, head_group,
    position); int64 [runs].
    """

    need: IntArray
    source: IntArray
    """Who sends it: its holder, or in the second hop a relay."""
    destination: IntArray
    chunk: IntArray
    kv_head_group: IntArray
    local: IntArray
    """First row at its holder; -1 in the second hop."""
    length: IntArray
    offset: IntArray
    """First row of the run within its need."""
    via: IntArray
    """The run that brings its rows, this one's first row first, to the relay; -1 in the first
    hop.
    """

    @property
    def second(self) -> NDArray[np.bool_]:
        """Whether a run travels in the second hop."""
        return self.via >= 0

    def rows(self, workers: int, chunks: int) -> IntArray:
        """kv head_group rows from worker i to j, by hop and chunk, [2, chunks, workers, workers]."""
        away = np.flatnonzero(self.source != self.destination)
        pair = self.second[away] * chunks + self.chunk[away]
        pair = (pair * workers + self.source[away]) * workers + self.destination[away]
        sent = np.zeros(2 * chunks * workers**2, dtype=np.int64)
        np.add.at(sent, pair, self.length[away])
        return sent.reshape(2, chunks, workers, workers)


def kv_transfers(geometry: Geometry, needs: KVFetches) -> KVTransfers:
    """What every non-resident need is assembled from, its own worker's rows included (source ==
    destination), straight from those who hold it.
    """
    wanted = np.flatnonzero(~needs.resident)
    need = np.repeat(wanted, needs.piece_count[wanted])
    piece = spread(needs.piece_first[wanted], needs.piece_count[wanted])
    pieces = geometry.sample_shards
    fragment = pieces.second[piece]
    start = pieces.start[piece]
    origin = geometry.sample_start[needs.sample[need]]
    stop = np.minimum(pieces.stop[piece], origin + needs.length[need])
    direct = KVTransfers(
        need=need,
        source=geometry.fragment_worker[fragment],
        destination=needs.worker[need],
        chunk=needs.chunk[need],
        kv_head_group=needs.kv_head_group[need],
        local=geometry.fragment_local[fragment] + start - geometry.fragment_start[fragment],
        length=stop - start,
        offset=start - origin,
        via=np.full_like(need, -1),
    )
    return in_order(direct, needs)


def in_order(moves: KVTransfers, needs: KVFetches) -> KVTransfers:
    """The same runs in the order in which both sides of a message expect them."""
    key = (2 * moves.chunk + moves.second) * (1 + int(needs.worker.max(initial=0)))
    key = (key + moves.destination) * (1 + int(moves.source.max(initial=0))) + moves.source
    # One destination's needs are ordered by sample and head_group.
    order = np.lexsort((moves.offset, key * len(needs.worker) + moves.need))
    now = np.empty_like(order)
    now[order] = np.arange(len(order))
    columns = {name: getattr(moves, name)[order] for name in KVTransfers.__slots__}
    columns["via"] = np.where(columns["via"] >= 0, now[columns["via"]], -1)
    return KVTransfers(**columns)
