"""The rows that one worker sends and receives, chunk by chunk.

K and V arrive in two exchanges: from the workers that hold them, then from workers that have
received them and pass them on.  The worker's own rows of a fetch follow, see `KVBufferRows`.

A *row* here is one head group of one token: a local tensor [tokens, heads, dim] seen as
[tokens * head groups, head group * dim], so that one gather packs all that is sent.

    2 head groups      token 0  token 1  token 2             send tokens 1 and 2 of head group 1:
    rows of k          0   1    2   3    4   5               send_index 3 5

Both sides order rows by (tile or fetch, head group, position), so no index travels with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import IntArray
from libra.plan.geometry import spread
from libra.plan.pool_plan import PoolPlan


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """One all-to-all of one kind of rows, as one worker sees it."""

    send_index: IntArray
    """Rows to send, ordered by destination: local ones, or received ones that are passed on."""
    send_splits: IntArray
    """Rows to each worker, [workers]."""
    recv_splits: IntArray
    """Rows from each worker, [workers]."""
    moves: bool
    """Whether any worker of the pool sends anything: all skip the exchange or none does."""

    @property
    def sent(self) -> int:
        """Rows that leave."""
        return int(self.send_splits.sum())

    @property
    def received(self) -> int:
        """Rows that arrive."""
        return int(self.recv_splits.sum())


@dataclass(frozen=True, slots=True, eq=False)
class KVBuffer:
    """One chunk's kv buffer: its rows as they arrive, and where they belong."""

    rows: int
    """Rows of the buffer."""
    own_index: IntArray
    """Local rows of fetches that the worker holds itself; they follow those that arrive."""
    permutation: IntArray | None
    """Buffer row of each arriving, then own row, [rows]; None if they arrive in buffer order."""


def q_all_to_alls(plan: PoolPlan, worker: int) -> tuple[AllToAll, ...]:
    """Q of moved tiles to the workers that compute them, for each chunk."""
    head_groups, per_chunk = plan.head_groups, plan.head_groups.per_chunk
    home, length = plan.tile_home, plan.tile_rows
    local = np.repeat(plan.geometry.block_local, head_groups.shards)
    away = (home != plan.assignment) & (length > 0)

    # Both sides order tiles by the other worker, then by tile ID.
    sent = np.flatnonzero(away & (home == worker))
    sent = sent[np.argsort(plan.assignment[sent], kind="stable")]
    got = np.flatnonzero(away & (plan.assignment == worker))
    send_splits = _rows_by_worker(plan.assignment[sent], length[sent] * per_chunk, plan.workers)
    recv_splits = _rows_by_worker(home[got], length[got] * per_chunk, plan.workers)
    # Rows of chunk 0; each further chunk sends the same tokens, `per_chunk` head groups on.
    head_group = sent % head_groups.shards * head_groups.per_shard
    first_row = (local[sent] * head_groups.count + head_group)[:, None] + np.arange(per_chunk)
    index = spread(first_row.ravel(), np.repeat(length[sent], per_chunk), head_groups.count)
    return tuple(
        AllToAll(
            send_index=index + chunk * per_chunk,
            send_splits=send_splits,
            recv_splits=recv_splits,
            moves=bool(away.any()),
        )
        for chunk in range(head_groups.chunks)
    )


def kv_all_to_alls(
    plan: PoolPlan, worker: int
) -> tuple[tuple[AllToAll, ...], tuple[AllToAll, ...], tuple[KVBuffer, ...]]:
    """K and V of each chunk: from the workers that hold the rows, from those that pass on rows of
    the first, and the buffers that both fill.
    """
    runs, kv_count = plan.kv_transfers, plan.head_groups.kv_count
    remote, passed_on = runs.source != runs.destination, runs.passed_on
    held_row = runs.source_row * kv_count + runs.kv_head_group  # in the first hop
    arrived_row = plan.kv_buffer_rows.arrival[runs.via]  # in the second
    kv, kv_multicast, kv_buffers = [], [], []
    for chunk in range(plan.head_groups.chunks):
        now = runs.chunk == chunk
        kv.append(_kv_hop(plan, worker, now & remote & ~passed_on, held_row, kv_count))
        kv_multicast.append(_kv_hop(plan, worker, now & passed_on, arrived_row, 1))
        mine = np.flatnonzero(now & (runs.destination == worker))
        kv_buffers.append(_kv_buffer(plan, mine, mine[~remote[mine]], held_row))
    return tuple(kv), tuple(kv_multicast), tuple(kv_buffers)


def _kv_hop(
    plan: PoolPlan, worker: int, hop: NDArray[np.bool_], first_row: IntArray, step: int
) -> AllToAll:
    """The exchange of the runs of one hop, whose rows lie `step` apart from `first_row` on."""
    runs = plan.kv_transfers
    sent = np.flatnonzero(hop & (runs.source == worker))  # ordered by destination
    got = np.flatnonzero(hop & (runs.destination == worker))
    length = runs.length
    return AllToAll(
        send_index=spread(first_row[sent], length[sent], step),
        send_splits=_rows_by_worker(runs.destination[sent], length[sent], plan.workers),
        recv_splits=_rows_by_worker(runs.source[got], length[got], plan.workers),
        moves=bool(hop.any()),
    )


def _kv_buffer(plan: PoolPlan, mine: IntArray, own: IntArray, held_row: IntArray) -> KVBuffer:
    """The buffer that runs `mine` fill; `own` are those of them that the worker holds itself."""
    length, rows = plan.kv_transfers.length, plan.kv_buffer_rows
    # arrival 2 0, buffer 0 3, length 3 2: arriving rows 2 3 4 belong in 0 1 2, and 0 1 in 3 4, so
    # the permutation is 3 4 0 1 2.
    arrival, buffer = rows.arrival[mine], rows.buffer[mine]
    permutation = None
    if not np.array_equal(arrival, buffer):
        permutation = np.empty(length[mine].sum(), dtype=np.int64)
        permutation[spread(arrival, length[mine])] = spread(buffer, length[mine])
    return KVBuffer(
        rows=int(length[mine].sum()),
        own_index=spread(held_row[own], length[own], plan.head_groups.kv_count),
        permutation=permutation,
    )


def _rows_by_worker(worker: NDArray[np.integer], rows: IntArray, workers: int) -> IntArray:
    return np.bincount(worker, weights=rows, minlength=workers).astype(np.int64)
