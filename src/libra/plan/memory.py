"""Bytes that attention holds beyond a worker's own q, k, v, out and their gradients, exactly.

    kept         from a layer's forward to its backward: Q, K and V from elsewhere, and outputs
                 computed for others (`backward="refetch"`: only the latter)
    workspace    for one call at a time, so once for all layers: rows packed to be sent, in whose
                 place outputs return if they are as wide; K and V that arrive in another order than
                 that of their buffer; in backward also gradients, and sums of dK and dV in at least
                 fp32

Not counted: memory that a kernel allocates for itself; the LSE, which any flash attention keeps;
contiguous copies of q, k, v and dout that are not contiguous; index maps, which belong to the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import IntArray
from libra.plan.geometry import scatter_add
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import kv_buffer_sizes, own_kv_rows

Count = TypeVar("Count", int, IntArray)
"""Of one worker, or of every worker, [workers]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory(Generic[Count]):
    """Elements that calls allocate."""

    fetched_q: Count
    """Q of others."""
    fetched_kv: Count
    """K and V of samples that lie elsewhere in part or whole."""
    peer_out: Count
    """Outputs computed for others."""
    forward: Count
    """Workspace of the forward, without the three above."""
    backward: Count
    """Workspace of the backward in the dtype of the tensors, without what the forward kept."""
    accum_fp32: Count
    """Workspace of the backward for sums, in at least fp32."""
    holder_scratch: Count
    """The part of it in which gradients from one worker are cast to fp32 where rows are held."""
    multicast_scratch: Count
    """The same where rows are passed on."""

    @property
    def fetched(self) -> Count:
        """Q, K and V from elsewhere."""
        return self.fetched_q + self.fetched_kv


def call_memory(plan: PoolPlan) -> CallMemory[IntArray]:
    """Elements that each worker's calls allocate, [workers] each."""
    heads, head_groups = plan.heads, plan.head_groups
    # Step 1: rows over all chunks, of head groups and kv head groups.
    q, kv = plan.moved_rows[0].sum(axis=0), plan.moved_rows[1:]
    q_sent, q_received = q.sum(axis=1), q.sum(axis=0)
    kv_sent, kv_received = kv.sum(axis=(0, 1, 3)), kv.sum(axis=(0, 1, 2))
    buffers = kv_buffer_sizes(plan)
    permuted, own = _permuted(plan), own_kv_rows(plan)
    kv_rows, permuted_rows = buffers.sum(axis=0), np.where(permuted, buffers, 0).sum(axis=0)

    # Step 2: widths of a row, in elements.
    q_row, o_row = head_groups.heads * heads.dim, head_groups.heads * heads.value_dim
    kv_row = head_groups.kv_heads * (heads.dim + heads.value_dim)
    wider = head_groups.kv_heads * max(heads.dim, heads.value_dim)

    # Step 3: what a forward and a backward call allocate.
    fetched_q, fetched_kv = q_received * q_row, kv_rows * kv_row
    q_both_ways = q_row if q_row == o_row else q_row + o_row  # outputs return into packed rows
    dispatched = (kv_sent + permuted_rows) * kv_row
    forward = q_sent * q_both_ways + dispatched
    backward = q_received * (q_row + o_row) + (kv_sent + kv_received) * kv_row
    if plan.config.backward == "refetch":  # Q travels again, as well as dO
        backward = backward + q_sent * (q_row + o_row) + fetched_q + fetched_kv + dispatched
    else:
        backward = backward + q_sent * q_both_ways

    # Step 4: sums in fp32.  Own rows of a permuted buffer lie anywhere in it and are gathered.
    # Narrower dtypes also need sums of all local rows, and gradients are cast one worker at a time.
    gathered = np.where(permuted, own, 0).max(axis=0)
    accum, at_holder, at_multicast = fetched_kv, gathered * wider, np.zeros_like(gathered)
    if heads.bytes < 4:
        backward = backward + permuted_rows * kv_row
        accum = accum + plan.geometry.rows * (heads.kv * (heads.dim + heads.value_dim))
        largest, largest_multicast = kv.max(axis=(1, 3))
        at_holder = np.maximum(gathered, largest) * wider
        at_multicast = largest_multicast * wider
    return CallMemory(
        fetched_q=fetched_q,
        fetched_kv=fetched_kv,
        peer_out=q_received * o_row,
        forward=forward,
        backward=backward,
        accum_fp32=accum + at_holder + at_multicast,
        holder_scratch=at_holder,
        multicast_scratch=at_multicast,
    )


def worker_memory(plan: PoolPlan, worker: int) -> CallMemory[int]:
    """Elements that one worker's calls allocate."""
    pool = call_memory(plan)
    return CallMemory(**{each.name: int(getattr(pool, each.name)[worker]) for each in fields(pool)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolMemory:
    """Bytes of every worker, int64 [workers] each."""

    kept: IntArray
    """From a layer's forward to its backward, each layer."""
    workspace: IntArray
    """For the calls of all layers, one at a time: enough for either pass of training."""
    workspace_without_gradients: IntArray
    """For forwards that no backward follows: nothing is kept, so all lies in the workspace."""


def pool_memory(plan: PoolPlan) -> PoolMemory:
    """`call_memory` in bytes."""
    memory, size = call_memory(plan), plan.heads.bytes
    # What is fetched again in backward lies in the workspace of either pass.
    again = memory.fetched * (plan.config.backward == "refetch")
    kept, forward = memory.fetched - again + memory.peer_out, memory.forward + again
    backward = memory.backward * size + memory.accum_fp32 * max(4, size)
    return PoolMemory(
        kept=kept * size,
        workspace=np.maximum(forward * size, backward),
        workspace_without_gradients=(kept + forward) * size,
    )


def _permuted(plan: PoolPlan) -> NDArray[np.bool_]:
    """Whether rows arrive in another order than that of their kv buffer, [chunks, workers]."""
    runs, rows = plan.kv_transfers, plan.kv_buffer_rows
    elsewhere = (rows.arrival != rows.buffer).astype(np.int64)
    shape = plan.head_groups.chunks, plan.workers
    return np.asarray(scatter_add(shape, (runs.chunk, runs.destination), elsewhere) > 0)
