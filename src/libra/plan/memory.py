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

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape
from libra.plan.messages import Message, lands_apart
from libra.plan.plan import PoolPlan
from libra.plan.route import Route
from libra.plan.tally import fetched_kv_rows, moved_q_rows

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteMemory:
    """Elements that one worker's calls take."""

    fetched_q: int
    """Q of others."""
    fetched_kv: int
    """K and V of samples that lie elsewhere in part or whole."""
    outputs: int
    """Outputs computed for others."""
    forward: int
    """Workspace of the forward, without the three above."""
    backward: int
    """Workspace of the backward in the dtype of the tensors; what the forward kept is not in it."""
    exact: int
    """Workspace of the backward for sums, in at least fp32."""
    wide: tuple[int, int]
    """The part of it in which gradients from one worker are widened, at holders and at relays."""

    @property
    def fetched(self) -> int:
        """Q, K and V from elsewhere."""
        return self.fetched_q + self.fetched_kv


def route_memory(route: Route, heads: HeadShape, *, refetch: bool) -> RouteMemory:
    """What the executor takes for a route; `refetch` has the backward fetch Q, K and V again."""
    lanes = route.lanes
    q_row, o_row = lanes.heads * heads.dim, lanes.heads * heads.value_dim
    kv_row = lanes.kv_heads * (heads.dim + heads.value_dim)
    q_sent, q_received = _rows(route.q)
    kv_sent, kv_received = _rows(route.kv)
    relay_sent, relay_received = _rows(route.relay)
    kv_rows = sum(assembly.rows for assembly in route.assembly)
    apart = sum(assembly.rows for assembly in route.assembly if assembly.apart)

    fetched_q, fetched_kv = q_received * q_row, kv_rows * kv_row
    both_ways = q_row if q_row == o_row else q_row + o_row  # returns take the place of packed rows
    forward = q_sent * both_ways + (kv_sent + relay_sent + apart) * kv_row
    backward = q_sent * (q_row + o_row if refetch else both_ways)  # Q travels again, beside dO
    backward += q_received * (q_row + o_row)
    backward += (kv_sent + kv_received + relay_sent + relay_received) * kv_row
    if refetch:
        backward += fetched_q + fetched_kv
        backward += (kv_sent + relay_sent + apart) * kv_row
    exact, wide = kv_rows * kv_row, [_most_own(route), 0]
    if heads.bytes < 4:
        backward += apart * kv_row
        exact += route.rows * heads.kv * (heads.dim + heads.value_dim)
        wide = [max(wide[0], _largest(route.kv)), _largest(route.relay)]
    wider = lanes.kv_heads * max(heads.dim, heads.value_dim)
    return RouteMemory(
        fetched_q=fetched_q,
        fetched_kv=fetched_kv,
        outputs=q_received * o_row,
        forward=forward,
        backward=backward,
        exact=exact + sum(wide) * wider,
        wide=(wide[0] * wider, wide[1] * wider),
    )


def _rows(messages: tuple[Message, ...]) -> tuple[int, int]:
    """Rows that all chunks' messages send, and bring."""
    sent = sum(int(message.send_counts.sum()) for message in messages)
    return sent, sum(message.received for message in messages)


def _largest(messages: tuple[Message, ...]) -> int:
    """Most rows that go to one worker at once: their gradients are widened one worker at a time."""
    return max(int(message.send_counts.max(initial=0)) for message in messages)


def _most_own(route: Route) -> int:
    """Most own rows of a kv buffer whose rows land apart: their sums lie anywhere in it."""
    return max((len(each.own) for each in route.assembly if each.apart), default=0)


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
    """`route_memory` of all workers at once, in bytes."""
    lanes, heads, workers = plan.lanes, plan.heads, plan.workers
    refetch = plan.config.backward == "refetch"
    q_row, o_row = lanes.heads * heads.dim, lanes.heads * heads.value_dim
    kv_row = lanes.kv_heads * (heads.dim + heads.value_dim)
    q = moved_q_rows(plan)
    kv = plan.kv_transfers.rows(workers, lanes.chunks)  # both hops
    q_sent, q_received = (lanes.chunks * q.sum(axis=axis) for axis in (1, 0))
    kv_sent, kv_received = (kv.sum(axis=(0, 1, axis)) for axis in (3, 2))
    kv_rows, apart = fetched_kv_rows(plan), lands_apart(plan)
    apart_rows = _apart_rows(plan, apart)

    fetched, outputs = q_received * q_row + kv_rows * kv_row, q_received * o_row
    both_ways = q_row if q_row == o_row else q_row + o_row
    dispatched = (kv_sent + apart_rows) * kv_row
    forward = q_sent * both_ways + dispatched + refetch * fetched
    backward = q_sent * (q_row + o_row if refetch else both_ways) + q_received * (q_row + o_row)
    backward += (kv_sent + kv_received) * kv_row + refetch * (fetched + dispatched)
    exact, wide = kv_rows * kv_row, _own_rows(plan, apart)
    if heads.bytes < 4:
        largest, relayed = kv.max(axis=(1, 3))
        backward += apart_rows * kv_row
        exact += plan.geometry.rows * heads.kv * (heads.dim + heads.value_dim)
        wide = np.maximum(wide, largest) + relayed
    exact += wide * lanes.kv_heads * max(heads.dim, heads.value_dim)
    both = backward * heads.bytes + exact * max(4, heads.bytes)
    kept = outputs if refetch else fetched + outputs
    alone = q_sent * both_ways + dispatched + fetched + outputs
    return PoolMemory(
        kept=kept * heads.bytes,
        workspace=np.maximum(forward * heads.bytes, both),
        workspace_without_gradients=alone * heads.bytes,
    )


def _apart_rows(plan: PoolPlan, apart: NDArray[np.bool_]) -> IntArray:
    """kv lane rows that land outside their buffer first, [workers]."""
    needs = plan.needs
    there = np.flatnonzero(~needs.resident)
    there = there[apart[needs.chunk[there], needs.worker[there]]]
    rows = np.zeros(plan.workers, dtype=np.int64)
    np.add.at(rows, needs.worker[there], needs.length[there])
    return rows


def _own_rows(plan: PoolPlan, apart: NDArray[np.bool_]) -> IntArray:
    """`_most_own` of every worker, [workers]."""
    moves = plan.kv_transfers
    own = np.flatnonzero(moves.source == moves.destination)
    rows = np.zeros(apart.shape, dtype=np.int64)
    np.add.at(rows, (moves.chunk[own], moves.destination[own]), moves.length[own])
    return np.asarray(np.where(apart, rows, 0).max(axis=0))
