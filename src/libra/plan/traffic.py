"""What every worker of a pool computes, moves and holds, chunk by chunk, forward and backward.

Counted for all workers at once from the plan.  Routes, which the run time executes, give the same
figures worker by worker; so does a real exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.attention_calls import LOCAL, PoolSegments, pool_segments
from libra.plan.plan_pool import PoolPlan

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolTraffic:
    """Counts of one layer's attention; int64, to read only, bytes as they lie in the tensors."""

    local_pairs: IntArray
    """Query-key pairs times heads that wait for nothing, [workers]."""
    pairs: IntArray
    """Query-key pairs times heads of each chunk, [workers, chunks]."""
    dispatched: IntArray
    """Forward: bytes of Q, K and V from worker i, who holds them, to worker j, [chunks, workers,
    workers].
    """
    relayed: IntArray
    """Forward: bytes of K and V that worker i passes on to worker j, the same shape."""
    returned: IntArray
    """Forward: bytes of O from worker i to worker j, [chunks, workers, workers]."""
    backward_dispatched: IntArray
    """Backward: bytes of dO, and of Q, K and V where they are fetched again, the same shape."""
    backward_relayed: IntArray
    """Backward: bytes of K and V that are passed on where they are fetched again."""
    backward_collected: IntArray
    """Backward: bytes of dK and dV from worker i to relay j, in the chunk after which they return,
    before its return.
    """
    backward_returned: IntArray
    """Backward: bytes of dQ, and of dK and dV to those who hold the rows, in the same chunk."""
    fetched_q: IntArray
    """Bytes that hold other workers' Q, [workers]."""
    fetched_kv: IntArray
    """Bytes that hold K and V of samples that lie elsewhere in part or whole, [workers]."""
    remote_o: IntArray
    """Bytes that hold outputs computed for other workers, [workers]."""
    segments: IntArray
    """Kernel segments over all launches of one pass, [workers]."""
    launches: IntArray
    """Kernel calls of one pass, [workers]."""

    @property
    def extra_memory(self) -> IntArray:
        """Bytes a worker holds beyond its own q, k, v and out while a layer runs forward,
        [workers].

        What is under way comes on top: see `libra.plan.memory`.
        """
        return self.fetched_q + self.fetched_kv + self.remote_o


def pool_traffic(plan: PoolPlan, work: PoolSegments | None = None) -> PoolTraffic:
    """Count a plan; `work` spares making its `pool_segments` again."""
    workers, head_groups, heads = plan.workers, plan.head_groups, plan.heads
    work = pool_segments(plan) if work is None else work
    q_row = head_groups.heads * heads.dim * heads.bytes
    kv_row = head_groups.kv_heads * (heads.dim + heads.value_dim) * heads.bytes
    o_row = head_groups.heads * heads.value_dim * heads.bytes

    q_rows = moved_q_rows(plan)  # of one chunk; all chunks move alike
    from_holders, from_relays = plan.kv_transfers.rows(workers, head_groups.chunks) * kv_row
    received = q_rows.sum(axis=0) * head_groups.chunks
    dispatched = from_holders + q_rows * q_row
    back_dispatched = np.broadcast_to(q_rows * o_row, dispatched.shape)
    if plan.config.backward == "refetch":
        back_dispatched = back_dispatched + dispatched
    back_collected, back_returned = np.zeros_like(dispatched), np.empty_like(dispatched)
    back_returned[:] = q_rows.T * q_row
    for buffer, chunk in enumerate(head_groups.kv_done):
        back_collected[chunk] += from_relays[buffer].T
        back_returned[chunk] += from_holders[buffer].T

    flat = np.zeros(workers * (head_groups.chunks + 1), dtype=np.int64)
    np.add.at(flat, work.worker * (head_groups.chunks + 1) + work.chunk - LOCAL, work.pairs)
    pairs = flat.reshape(workers, head_groups.chunks + 1)
    return PoolTraffic(
        local_pairs=pairs[:, 0].copy(),
        pairs=pairs[:, 1:].copy(),
        dispatched=dispatched,
        relayed=from_relays,
        returned=np.broadcast_to(q_rows.T * o_row, dispatched.shape),
        backward_dispatched=back_dispatched,
        backward_relayed=from_relays * (plan.config.backward == "refetch"),
        backward_collected=back_collected,
        backward_returned=back_returned,
        fetched_q=received * q_row,
        fetched_kv=fetched_kv_rows(plan).sum(axis=0) * kv_row,
        remote_o=received * o_row,
        segments=np.bincount(work.worker, minlength=workers),
        launches=_launches(work, plan),
    )


def held_for_others(plan: PoolPlan) -> IntArray:
    """`PoolTraffic.extra_memory` without the rest of a traffic, int64 [workers]."""
    kv_row = plan.head_groups.kv_heads * (plan.heads.dim + plan.heads.value_dim) * plan.heads.bytes
    queries, _, outputs = plan.traffic
    keys = fetched_kv_rows(plan).sum(axis=0) * kv_row
    return np.asarray(queries.sum(axis=0) + keys + outputs.sum(axis=1))


def moved_q_rows(plan: PoolPlan) -> IntArray:
    """Lane rows of Q that worker i sends to worker j in one chunk, [workers, workers]."""
    geometry, head_groups = plan.geometry, plan.head_groups
    home = np.repeat(geometry.block_worker, head_groups.shards)
    rows = np.repeat(geometry.block_stop - geometry.block_start, head_groups.shards)
    away = np.flatnonzero(home != plan.assignment)
    sent = np.zeros(plan.workers**2, dtype=np.int64)
    np.add.at(
        sent, home[away] * plan.workers + plan.assignment[away], rows[away] * head_groups.per_chunk
    )
    return sent.reshape(plan.workers, plan.workers)


def fetched_kv_rows(plan: PoolPlan) -> IntArray:
    """kv head_group rows in each kv buffer of each worker, [chunks, workers]: all rows of its needs, own
    ones included, unless they lie side by side with it anyway.
    """
    needs, fetched = plan.kv_fetches, np.flatnonzero(~plan.kv_fetches.resident)
    rows = np.zeros((plan.head_groups.chunks, plan.workers), dtype=np.int64)
    np.add.at(rows, (needs.chunk[fetched], needs.worker[fetched]), needs.length[fetched])
    return rows


def _launches(work: PoolSegments, plan: PoolPlan) -> IntArray:
    """Kernel calls of each worker: its segments of equal buffers and head width are one."""
    buffers, heads = plan.head_groups.chunks + 1, plan.heads
    key = work.worker
    for values, most in (
        (work.chunk - LOCAL, buffers),
        (work.q_buffer - LOCAL, buffers),
        (work.kv_buffer - LOCAL, buffers),
        (work.heads, heads.q + 1),
        (work.kv_heads, heads.kv + 1),
    ):
        key = key * most + values
    calls = np.unique(key) // (buffers**3 * (heads.q + 1) * (heads.kv + 1))
    return np.bincount(calls, minlength=plan.workers)
