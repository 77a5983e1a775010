"""What attention holds beyond a worker's own q, k, v, out and their gradients, byte for byte.

    kept         from a layer's forward to its backward: Q, K and V from elsewhere, and outputs
                 computed for others (`backward="refetch"`: only the latter)
    workspace    for one call at a time, so once for all layers: rows packed to be sent, where they
                 also return to if they are as wide; K and V that land in another order than they
                 are needed in; in backward also gradients, and sums of dK and dV in at least fp32

Not counted: what a kernel takes for itself; the LSE, which any flash attention keeps; contiguous
copies of q, k, v and dout that are not contiguous; index maps, which belong to the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape
from libra.plan.all_to_all import AllToAll
from libra.plan.head_groups import HeadGroups
from libra.plan.plan_pool import PoolPlan
from libra.plan.rank_plan import RankPlan
from libra.plan.traffic import fetched_kv_rows, moved_q_rows

IntArray = NDArray[np.int64]


Count = TypeVar("Count", int, IntArray)
"""Of one worker, or of every worker, [workers]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts(Generic[Count]):
    """Lane rows over all chunks, of q head_groups and kv head_groups."""

    rows: Count
    """Local rows."""
    q_sent: Count
    q_received: Count
    kv_sent: Count
    """To those who need them and to relays, and by relays."""
    kv_received: Count
    kv_rows: Count
    """Rows of the kv buffers."""
    apart: Count
    """Those of buffers outside which rows land first."""
    own: Count
    """Most own rows of such a buffer: their sums lie anywhere in it."""
    largest: Count
    """Most K and V rows to one worker at once: gradients are widened one worker at a time."""
    largest_relayed: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory(Generic[Count]):
    """Elements that calls take."""

    fetched_q: Count
    """Q of others."""
    fetched_kv: Count
    """K and V of samples that lie elsewhere in part or whole."""
    outputs: Count
    """Outputs computed for others."""
    forward: Count
    """Workspace of the forward, without the three above."""
    backward: Count
    """Workspace of the backward in the dtype of the tensors; what the forward kept is not in it."""
    exact: Count
    """Workspace of the backward for sums, in at least fp32."""
    wide: tuple[Count, Count]
    """The part of it in which gradients from one worker are widened, at holders and at relays."""

    @property
    def fetched(self) -> Count:
        """Q, K and V from elsewhere."""
        return self.fetched_q + self.fetched_kv


def rank_memory(rank_plan: RankPlan, heads: HeadShape, *, refetch: bool) -> CallMemory[int]:
    """What the executor takes for a rank_plan; `refetch` has the backward fetch Q, K and V again."""
    hops, apart = (
        (*rank_plan.kv, *rank_plan.kv_multicast),
        [each for each in rank_plan.kv_buffers if each.permutation is not None],
    )
    counts = _Counts(
        rows=rank_plan.rows,
        q_sent=sum(_sent(message) for message in rank_plan.q),
        q_received=sum(message.received for message in rank_plan.q),
        kv_sent=sum(_sent(message) for message in hops),
        kv_received=sum(message.received for message in hops),
        kv_rows=sum(assembly.rows for assembly in rank_plan.kv_buffers),
        apart=sum(assembly.rows for assembly in apart),
        own=max((len(assembly.own_index) for assembly in apart), default=0),
        largest=max(int(message.send_splits.max(initial=0)) for message in rank_plan.kv),
        largest_relayed=max(
            int(message.send_splits.max(initial=0)) for message in rank_plan.kv_multicast
        ),
    )
    return _call_memory(counts, rank_plan.head_groups, heads, refetch=refetch)


def _sent(message: AllToAll) -> int:
    return int(message.send_splits.sum())


def _call_memory(
    counts: _Counts[Count], head_groups: HeadGroups, heads: HeadShape, *, refetch: bool
) -> CallMemory[Count]:
    q_row, o_row = head_groups.heads * heads.dim, head_groups.heads * heads.value_dim
    kv_row = head_groups.kv_heads * (heads.dim + heads.value_dim)
    wider = head_groups.kv_heads * max(heads.dim, heads.value_dim)
    fetched_q, fetched_kv = counts.q_received * q_row, counts.kv_rows * kv_row
    both_ways = q_row if q_row == o_row else q_row + o_row  # returns take the place of packed rows
    dispatched = (counts.kv_sent + counts.apart) * kv_row
    forward = counts.q_sent * both_ways + dispatched
    backward = counts.q_received * (q_row + o_row)
    backward = backward + (counts.kv_sent + counts.kv_received) * kv_row
    if refetch:  # Q travels again, beside dO
        backward = backward + counts.q_sent * (q_row + o_row)
        backward = backward + fetched_q + fetched_kv + dispatched
    else:
        backward = backward + counts.q_sent * both_ways
    exact, wide, wide_relayed = fetched_kv, counts.own * wider, counts.own * 0
    if heads.bytes < 4:
        backward = backward + counts.apart * kv_row
        exact = exact + counts.rows * (heads.kv * (heads.dim + heads.value_dim))
        wide = np.maximum(counts.own, counts.largest) * wider
        wide_relayed = counts.largest_relayed * wider
    return CallMemory(
        fetched_q=fetched_q,
        fetched_kv=fetched_kv,
        outputs=counts.q_received * o_row,
        forward=forward,
        backward=backward,
        exact=exact + wide + wide_relayed,
        wide=(wide, wide_relayed),
    )


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
    """`rank_memory` of all workers at once, in bytes."""
    head_groups, workers, size = plan.head_groups, plan.workers, plan.heads.bytes
    refetch = plan.config.backward == "refetch"
    q = moved_q_rows(plan) * head_groups.chunks
    kv = plan.kv_transfers.rows(workers, head_groups.chunks)  # [hops, chunks, workers, workers]
    buffers, apart = fetched_kv_rows(plan), _permuted(plan)
    largest, largest_relayed = kv.max(axis=(1, 3))
    counts = _Counts(
        rows=plan.geometry.rows,
        q_sent=q.sum(axis=1),
        q_received=q.sum(axis=0),
        kv_sent=kv.sum(axis=(0, 1, 3)),
        kv_received=kv.sum(axis=(0, 1, 2)),
        kv_rows=buffers.sum(axis=0),
        apart=np.where(apart, buffers, 0).sum(axis=0),
        own=np.where(apart, _own_rows(plan), 0).max(axis=0),
        largest=largest,
        largest_relayed=largest_relayed,
    )
    memory = _call_memory(counts, head_groups, plan.heads, refetch=refetch)
    kept = memory.outputs if refetch else memory.fetched + memory.outputs
    everything = memory.forward + memory.fetched + memory.outputs
    forward = (memory.forward + memory.fetched if refetch else memory.forward) * size
    backward = memory.backward * size + memory.exact * max(4, size)
    return PoolMemory(
        kept=kept * size,
        workspace=np.maximum(forward, backward),
        workspace_without_gradients=everything * size,
    )


def _own_rows(plan: PoolPlan) -> IntArray:
    """kv head_group rows of each kv buffer that its worker holds itself, [chunks, workers]."""
    moves = plan.kv_transfers
    own = np.flatnonzero(moves.source == moves.destination)
    rows = np.zeros((plan.head_groups.chunks, plan.workers), dtype=np.int64)
    np.add.at(rows, (moves.chunk[own], moves.destination[own]), moves.length[own])
    return rows


def _permuted(plan: PoolPlan) -> NDArray[np.bool_]:
    """Whether rows arrive in another order than that of their kv buffer, [chunks, workers]."""
    runs, rows = plan.kv_transfers, plan.kv_buffer_rows
    elsewhere = np.flatnonzero(rows.arrival != rows.buffer)
    permuted = np.zeros((plan.head_groups.chunks, plan.workers), dtype=np.bool_)
    permuted[runs.chunk[elsewhere], runs.destination[elsewhere]] = True
    return permuted
