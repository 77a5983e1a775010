"""Which K and V rows each worker needs, and where they come from.

A *need* is (worker, sample, kv lane): rows [0, length) of the sample, once per worker however many
tiles read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.geometry import Geometry, spread
from libra.plan.lanes import Lanes

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """All needs of a pool, ordered by (worker, sample, kv lane); int64 [needs]."""

    worker: IntArray
    sample: IntArray
    kv_lane: IntArray
    length: IntArray
    """Rows from the sample's first."""
    chunk: IntArray
    """First chunk that reads it."""
    resident: NDArray[np.bool_]
    """The worker holds all these rows side by side already."""
    piece_first: IntArray
    """First entry of the need in `Geometry.holdings`."""
    piece_count: IntArray
    """Entries that cover its rows."""

    def find(self, worker: IntArray, sample: IntArray, kv_lane: IntArray, lanes: Lanes) -> IntArray:
        """Index of each (worker, sample, kv lane)."""
        samples = 1 + max(int(self.sample.max(initial=0)), int(sample.max(initial=0)))
        key = (self.worker * samples + self.sample) * lanes.kv_count + self.kv_lane
        return np.searchsorted(key, (worker * samples + sample) * lanes.kv_count + kv_lane)


def pool_needs(
    geometry: Geometry, assignment: NDArray[np.int32], lanes: Lanes, *, complete_groups: bool
) -> Needs:
    """Needs that follow from a placement; with `complete_groups` every touched sample is needed
    whole.
    """
    shards, chunks = lanes.shards, lanes.chunks
    # One row per (visit, shard): the worker that computes it, and the kv lanes the shard touches.
    visit = geometry.visits
    worker = assignment.reshape(-1, shards)[visit.first].astype(np.int64)
    start, stop = geometry.sample_start[visit.second], geometry.sample_stop[visit.second]
    length = (stop if complete_groups else visit.stop) - start

    lane = np.arange(lanes.count, dtype=np.int64)
    pairs = np.unique(np.stack([lane // lanes.per_shard, lanes.kv_lane(lane)]), axis=1)
    first_chunk = np.full((shards, lanes.kv_count), chunks, dtype=np.int64)
    np.minimum.at(first_chunk, (lane // lanes.per_shard, lanes.kv_lane(lane)), lanes.chunk(lane))
    shard, kv_lane = pairs

    samples = len(geometry.sample_start)
    key = (worker[:, shard] * samples + visit.second[:, None]) * lanes.kv_count + kv_lane
    order = np.argsort(key, axis=None, kind="stable")
    key = key.ravel()[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    rows = np.broadcast_to(length[:, None], (len(length), len(shard))).ravel()[order]
    chunk = np.broadcast_to(first_chunk[shard, kv_lane], (len(length), len(shard))).ravel()[order]
    key = key[first]
    sample = key // lanes.kv_count % samples
    need_worker = key // lanes.kv_count // samples
    need_length = np.maximum.reduceat(rows, first) if len(first) else rows
    need_chunk = np.minimum.reduceat(chunk, first) if len(first) else chunk

    pieces = geometry.holdings
    piece_offset = np.searchsorted(pieces.first, np.arange(samples))
    piece_first = piece_offset[sample]
    sample_end = geometry.sample_start[sample] + need_length
    covered = np.searchsorted(
        pieces.start, sample_end, side="left"
    )  # pieces ascend over the whole pool
    holder = geometry.fragment_worker[pieces.second[piece_first]]
    return Needs(
        worker=need_worker,
        sample=sample,
        kv_lane=key % lanes.kv_count,
        length=need_length,
        chunk=need_chunk,
        resident=(covered - piece_first == 1) & (holder == need_worker),
        piece_first=piece_first,
        piece_count=covered - piece_first,
    )


@dataclass(frozen=True, slots=True, eq=False)
class KVTransfers:
    """Runs of local rows of one kv lane, ordered by (chunk, destination, source, sample, lane,
    position).
    """

    need: IntArray
    source: IntArray
    destination: IntArray
    chunk: IntArray
    kv_lane: IntArray
    local: IntArray
    """First row at the source."""
    length: IntArray
    offset: IntArray
    """First row of the run within its need."""


def kv_transfers(geometry: Geometry, needs: Needs) -> KVTransfers:
    """What every non-resident need is assembled from, its own worker's rows included (source ==
    destination).
    """
    wanted = np.flatnonzero(~needs.resident)
    need = np.repeat(wanted, needs.piece_count[wanted])
    piece = spread(needs.piece_first[wanted], needs.piece_count[wanted])
    pieces = geometry.holdings
    fragment = pieces.second[piece]
    start = pieces.start[piece]
    stop = np.minimum(
        pieces.stop[piece], geometry.sample_start[needs.sample[need]] + needs.length[need]
    )
    source = geometry.fragment_worker[fragment]
    order = np.lexsort(
        (
            start,
            needs.kv_lane[need],
            needs.sample[need],
            source,
            needs.worker[need],
            needs.chunk[need],
        )
    )
    need, source, start, stop = need[order], source[order], start[order], stop[order]
    return KVTransfers(
        need=need,
        source=source,
        destination=needs.worker[need],
        chunk=needs.chunk[need],
        kv_lane=needs.kv_lane[need],
        local=geometry.fragment_local[fragment[order]]
        + start
        - geometry.fragment_start[fragment[order]],
        length=stop - start,
        offset=start - geometry.sample_start[needs.sample[need]],
    )
