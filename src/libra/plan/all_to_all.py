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

from dataclasses import dataclass, replace

import numpy as np

from libra.data.lengths import IntArray
from libra.plan.geometry import Columns, scatter_add, spread
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


@dataclass(frozen=True, slots=True, eq=False)
class _Runs(Columns):
    """Runs of rows that travel, [runs]."""

    source: IntArray
    destination: IntArray
    first_row: IntArray
    """First row at the source."""
    length: IntArray


def q_all_to_alls(plan: PoolPlan, worker: int) -> tuple[AllToAll, ...]:
    """Q of moved tiles to the workers that compute them, for each chunk."""
    head_groups, per_chunk = plan.head_groups, plan.head_groups.per_chunk
    home, rows = plan.tile_home, plan.tile_rows
    # A run for each head group of a tile in chunk 0.  Both sides order tiles by the other worker,
    # then by tile ID.
    away = np.flatnonzero((home != plan.assignment) & (rows > 0))
    tile = np.repeat(away, per_chunk)
    block, shard = np.divmod(tile, head_groups.shards)
    head_group = shard * head_groups.per_shard + np.tile(np.arange(per_chunk), len(away))
    first_row = plan.geometry.block_local[block] * head_groups.count + head_group
    runs = _Runs(home[tile], plan.assignment[tile].astype(np.int64), first_row, rows[tile])
    chunk_0 = _exchange(runs, worker, plan.workers, head_groups.count)
    # Each further chunk sends the same tokens, `per_chunk` head groups on.
    return tuple(
        replace(chunk_0, send_index=chunk_0.send_index + chunk * per_chunk)
        for chunk in range(head_groups.chunks)
    )


def kv_all_to_alls(
    plan: PoolPlan, worker: int
) -> tuple[tuple[AllToAll, ...], tuple[AllToAll, ...], tuple[KVBuffer, ...]]:
    """K and V of each chunk: from the workers that hold the rows, from those that pass on rows of
    the first, and the buffers that both fill.
    """
    runs, kv_count, workers = plan.kv_transfers, plan.head_groups.kv_count, plan.workers
    own, passed_on = runs.source == runs.destination, runs.passed_on
    held_row = runs.source_row * kv_count + runs.kv_head_group
    first_row = np.where(passed_on, plan.kv_buffer_rows.arrival[runs.via], held_row)
    rows = _Runs(runs.source, runs.destination, first_row, runs.length)
    kv, kv_multicast, kv_buffers = [], [], []
    for chunk in range(plan.head_groups.chunks):
        now = runs.chunk == chunk
        held, received = rows.take(now & ~own & ~passed_on), rows.take(now & passed_on)
        kv.append(_exchange(held, worker, workers, kv_count))
        kv_multicast.append(_exchange(received, worker, workers, 1))
        mine = np.flatnonzero(now & (runs.destination == worker))
        kv_buffers.append(_kv_buffer(plan, mine, rows.take(mine[own[mine]])))
    return tuple(kv), tuple(kv_multicast), tuple(kv_buffers)


def _exchange(runs: _Runs, worker: int, workers: int, step: int) -> AllToAll:
    """The exchange of runs whose rows lie `step` apart."""
    sent, got = runs.take(runs.source == worker), runs.take(runs.destination == worker)
    sent = sent.take(np.argsort(sent.destination, kind="stable"))
    return AllToAll(
        send_index=spread(sent.first_row, sent.length, step),
        send_splits=scatter_add((workers,), sent.destination, sent.length),
        recv_splits=scatter_add((workers,), got.source, got.length),
        moves=len(runs.source) > 0,
    )


def _kv_buffer(plan: PoolPlan, mine: IntArray, own: _Runs) -> KVBuffer:
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
        own_index=spread(own.first_row, own.length, plan.head_groups.kv_count),
        permutation=permutation,
    )
