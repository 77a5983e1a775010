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
    """Runs of rows of one kv lane, ordered by (chunk, hop, destination, source, sample, lane,
    position); int64 [runs].
    """

    need: IntArray
    source: IntArray
    """Who sends it: its holder, or in the second hop a relay."""
    destination: IntArray
    chunk: IntArray
    kv_lane: IntArray
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
        """kv lane rows from worker i to j, by hop and chunk, [2, chunks, workers, workers]."""
        away = np.flatnonzero(self.source != self.destination)
        pair = self.second[away] * chunks + self.chunk[away]
        pair = (pair * workers + self.source[away]) * workers + self.destination[away]
        sent = np.zeros(2 * chunks * workers**2, dtype=np.int64)
        np.add.at(sent, pair, self.length[away])
        return sent.reshape(2, chunks, workers, workers)


def kv_transfers(geometry: Geometry, needs: Needs) -> KVTransfers:
    """What every non-resident need is assembled from, its own worker's rows included (source ==
    destination), straight from those who hold it.
    """
    wanted = np.flatnonzero(~needs.resident)
    need = np.repeat(wanted, needs.piece_count[wanted])
    piece = spread(needs.piece_first[wanted], needs.piece_count[wanted])
    pieces = geometry.holdings
    fragment = pieces.second[piece]
    start = pieces.start[piece]
    origin = geometry.sample_start[needs.sample[need]]
    stop = np.minimum(pieces.stop[piece], origin + needs.length[need])
    direct = KVTransfers(
        need=need,
        source=geometry.fragment_worker[fragment],
        destination=needs.worker[need],
        chunk=needs.chunk[need],
        kv_lane=needs.kv_lane[need],
        local=geometry.fragment_local[fragment] + start - geometry.fragment_start[fragment],
        length=stop - start,
        offset=start - origin,
        via=np.full_like(need, -1),
    )
    return in_order(direct, needs)


def in_order(moves: KVTransfers, needs: Needs) -> KVTransfers:
    """The same runs in the order in which both sides of a message expect them."""
    key = (2 * moves.chunk + moves.second) * (1 + int(needs.worker.max(initial=0)))
    key = (key + moves.destination) * (1 + int(moves.source.max(initial=0))) + moves.source
    # One destination's needs are ordered by sample and lane.
    order = np.lexsort((moves.offset, key * len(needs.worker) + moves.need))
    now = np.empty_like(order)
    now[order] = np.arange(len(order))
    columns = {name: getattr(moves, name)[order] for name in KVTransfers.__slots__}
    columns["via"] = np.where(columns["via"] >= 0, now[columns["via"]], -1)
    return KVTransfers(**columns)
