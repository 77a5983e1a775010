"""Counts of a whole pool: pairs that its workers compute, bytes that they move and hold, and the
limits on them.

All bytes are views of one table of rows, `PoolPlan.moved_rows`.  The rank plans that the runtime
executes give the same figures worker by worker; so does a real exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from libra.config import HeadShape, PoolConfig
from libra.data.lengths import IntArray
from libra.plan.attention_calls import LOCAL, PoolSegments, pool_segments
from libra.plan.geometry import scatter_add
from libra.plan.pool_plan import PoolPlan

_NO_LIMIT: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolTraffic:
    """Counts of one layer's attention; int64, read-only, bytes as they lie in the tensors."""

    local_pairs: IntArray
    """Query-key pairs times heads that wait for no transfer, [workers]."""
    pairs: IntArray
    """Query-key pairs times heads of each chunk, [workers, chunks]."""
    dispatched: IntArray
    """Forward: bytes of Q, K and V from worker i, who holds them, to worker j, [chunks, workers,
    workers].
    """
    passed_on: IntArray
    """Forward: bytes of K and V that worker i passes on to worker j, the same shape."""
    returned: IntArray
    """Forward: bytes of O from worker i to worker j, the same shape."""
    backward_dispatched: IntArray
    """Backward: bytes of dO, and of Q, K and V where they are fetched again, the same shape."""
    backward_passed_on: IntArray
    """Backward: bytes of K and V that are passed on where they are fetched again."""
    backward_collected: IntArray
    """Backward: bytes of dK and dV from worker i to worker j, which passed the rows on, in the
    chunk after which they return, before its return.
    """
    backward_returned: IntArray
    """Backward: bytes of dQ, and of dK and dV to those who hold the rows, in the same chunk."""
    fetched_q: IntArray
    """Bytes that hold other workers' Q, [workers]."""
    fetched_kv: IntArray
    """Bytes that hold K and V of samples that lie elsewhere in part or whole, [workers]."""
    peer_out: IntArray
    """Bytes that hold outputs computed for other workers, [workers]."""
    segments: IntArray
    """Kernel segments over all calls of one pass, [workers]."""
    calls: IntArray
    """Kernel calls of one pass, [workers]."""

    @property
    def extra_memory(self) -> IntArray:
        """Bytes a worker holds beyond its own q, k, v and out while a layer runs forward,
        [workers].

        Rows under way come on top: see `libra.plan.memory`.
        """
        return self.fetched_q + self.fetched_kv + self.peer_out


def pool_traffic(plan: PoolPlan, segments: PoolSegments | None = None) -> PoolTraffic:
    """Count a plan; `segments` spares making its `pool_segments` again."""
    head_groups, heads = plan.head_groups, plan.heads
    segments = pool_segments(plan) if segments is None else segments
    q_row, o_row = heads.q_bytes(head_groups.heads), heads.o_bytes(head_groups.heads)
    q, kv, passed_on = plan.moved_rows
    kv, passed_on = (rows * heads.kv_bytes(head_groups.kv_heads) for rows in (kv, passed_on))
    back = q.transpose(0, 2, 1)

    dispatched, again = q * q_row + kv, plan.config.backward == "refetch"
    # dK and dV return after the last chunk that reads their buffer, first to who passed rows on.
    backward_collected, backward_returned = np.zeros_like(kv), back * q_row
    for buffer, chunk in enumerate(head_groups.kv_done):
        backward_collected[chunk] += passed_on[buffer].T
        backward_returned[chunk] += kv[buffer].T

    # Local pairs in column 0, those of chunk c in column c + 1.
    shape = plan.workers, head_groups.chunks + 1
    pairs = scatter_add(shape, (segments.worker, segments.chunk - LOCAL), segments.pairs)
    fetched_q, fetched_kv, peer_out = _held_for_others(plan)
    order, opens = segments.calls()
    return PoolTraffic(
        local_pairs=pairs[:, 0].copy(),
        pairs=pairs[:, 1:].copy(),
        dispatched=dispatched,
        passed_on=passed_on,
        returned=back * o_row,
        backward_dispatched=q * o_row + again * dispatched,
        backward_passed_on=again * passed_on,
        backward_collected=backward_collected,
        backward_returned=backward_returned,
        fetched_q=fetched_q,
        fetched_kv=fetched_kv,
        peer_out=peer_out,
        segments=np.bincount(segments.worker, minlength=plan.workers),
        calls=np.bincount(segments.worker[order[opens]], minlength=plan.workers),
    )


def own_kv_rows(plan: PoolPlan) -> IntArray:
    """Rows of each kv buffer that its worker holds itself, int64 [chunks, workers]."""
    runs = plan.kv_transfers
    own = runs.take(np.flatnonzero(runs.source == runs.destination))
    shape = plan.head_groups.chunks, plan.workers
    return scatter_add(shape, (own.chunk, own.destination), own.length)


def kv_buffer_sizes(plan: PoolPlan) -> IntArray:
    """Rows of each kv buffer of each worker, int64 [chunks, workers]: those that arrive by either
    hop, and its own.
    """
    return np.asarray(plan.moved_rows[1:].sum(axis=(0, 2)) + own_kv_rows(plan))


def _held_for_others(plan: PoolPlan) -> IntArray:
    """Bytes that hold fetched Q, fetched K and V, and outputs computed for others, int64 [3,
    workers].
    """
    q, _, o = plan.traffic
    kv_row = plan.heads.kv_bytes(plan.head_groups.kv_heads)
    kv = kv_buffer_sizes(plan).sum(axis=0) * kv_row
    return np.stack([q.sum(axis=0), kv, o.sum(axis=1)])


def byte_limits(config: PoolConfig, heads: HeadShape, rows: int) -> IntArray:
    """Most bytes that a worker sends, receives and holds for work that is computed away from home,
    int64 [3].

    The unit is what every worker has anyway, the bytes of q, k, v and out of its `rows` rows.  K
    and V that a worker needs for rows of its own are not counted: no placement spares it those.
    The backward pass sends what the forward pass received, gradient for tensor, so one limit for
    both directions holds for both passes (`refetch` moves the forward's bytes once more).
    """
    own = rows * heads.token_bytes
    traffic, memory = (
        int(min(_NO_LIMIT, factor * own)) for factor in (config.traffic_limit, config.memory_limit)
    )
    return np.array([traffic, traffic, memory], dtype=np.int64)


def keeps_limits(plan: PoolPlan, other: PoolPlan) -> bool:
    """Whether no worker of `plan` sends, receives or holds more than a limit allows, or than the
    busiest worker of another plan of the pool, which keeps the limits.
    """
    limits = byte_limits(plan.config, plan.heads, int(plan.geometry.rows.max()))
    return bool((_busiest(plan) <= np.maximum(limits, _busiest(other))).all())


def _busiest(plan: PoolPlan) -> IntArray:
    """Bytes that the busiest worker sends, receives and holds, int64 [3]."""
    moved, held = plan.traffic.sum(axis=0), _held_for_others(plan).sum(axis=0)
    return np.array([moved.sum(axis=1).max(), moved.sum(axis=0).max(), held.max()])
