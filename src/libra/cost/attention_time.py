"""Predicted seconds of one layer's attention in a pool, for `libra plan` and `libra simulate`.

plan ──> kernel segments ── kernel table ──> seconds of each worker and chunk ─┐
  └────> bytes of every exchange ── links of the cluster ──────────────────────┴─> Timeline

A `Timeline` is a model of one pass in time: when each worker sends, computes and receives.

    network   | dispatch 0 | dispatch 1 | dispatch 2 |       | return 0 | return 1 | return 2 |
    compute   | local work .......| attend 0 | attend 1 | attend 2 |
              0                                                                      makespan

The order is the executor's, in both passes:

1. All dispatches are posted at once, in chunk order.
2. The work that waits for nothing runs first.
3. Chunk by chunk, a worker waits for the chunk's dispatch, computes its attention and posts its
   return.  The return queues behind all that the worker's network still has to send.

Backward dispatches dO (and Q, K and V where they are fetched again) and returns dQ, and returns dK
and dV with the last chunk that adds to them.  A KV multicast has two hops: the holder scatters the
rows, then the receivers pass their parts on, each as soon as its own part has arrived.  In backward
dK and dV travel the same way back.

Simplifications.  An exchange takes a worker as long as its busiest link needs for the worker's own
bytes (sent or received, within the node or between nodes; both links work at the same time), and
one fixed latency.  Congestion elsewhere is not modelled.  An exchange begins for a worker when the
worker and all who send to it have reached it; a late receiver delays nobody, because the executor
posts the returns of workers that compute nothing for others early.  Attention runs at full speed
during transfers, and packing rows takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from libra.cost.arrays import Seconds, check_array
from libra.cost.hardware import Cluster
from libra.cost.kernel_table import DIRECTIONS, Direction, KernelTable
from libra.data.lengths import IntArray
from libra.plan.attention_calls import LOCAL, PoolSegments, pool_segments
from libra.plan.memory import pool_memory
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import PoolTraffic, pool_traffic


class Spans(NamedTuple):
    """Start and end of each worker's work or exchange of each chunk, float64 [workers, chunks]."""

    start: Seconds
    end: Seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Each worker's work and exchanges, in seconds from the start of the pass.

    Work and exchanges that do not exist have no length.
    """

    compute: Seconds
    """Seconds that each worker computes, [workers]."""
    local_end: Seconds
    """End of the work that waits for nothing, which starts at 0, [workers]."""
    dispatch: Spans
    attend: Spans
    returns: Spans

    @property
    def finish(self) -> Seconds:
        """Time at which each worker has computed its tiles and received its outputs, [workers]."""
        # A return, even an empty one, follows its attention.
        return np.asarray(self.returns.end[:, -1])

    @property
    def exposed(self) -> Seconds:
        """Seconds until its finish in which each worker does not compute, [workers]."""
        return self.finish - self.compute

    @property
    def makespan(self) -> float:
        """Time at which the last worker finishes."""
        return float(self.finish.max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolTimelines:
    """Both passes of one layer's attention in a pool."""

    forward: Timeline
    backward: Timeline
    traffic: PoolTraffic
    """The plan's own counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """One layer's attention of one pool: seconds of a pass, bytes of a worker."""

    forward_seconds: float
    """Until the pool's last worker has all its results."""
    backward_seconds: float
    compute_seconds: float
    """Attention of the busiest worker in both passes."""
    mean_compute_seconds: float
    """The same of the mean worker."""
    kept_bytes: float
    """Most bytes that a worker keeps of others, or for them, until the backward."""
    workspace_bytes: float
    """Most bytes that a worker allocates for one call at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTime:
    """Times a plan on a cluster: kernel segments by a table, exchanges by the plan's own bytes."""

    cluster: Cluster
    table: KernelTable
    """For the head dims of the plans."""

    tp: int = 1
    """Tensor-parallel ranks that make up a worker."""

    overlap: bool = True
    """False waits for the whole dispatch, then computes, then returns: no pipeliner."""

    def timelines(self, plan: PoolPlan) -> PoolTimelines:
        """Both passes of one layer, played in time."""
        # Segments are enumerated once, for the counts and for both passes.
        work = pool_segments(plan)
        traffic = pool_traffic(plan, work)
        passes = {}
        for direction in DIRECTIONS:
            attend = attend_seconds(work, self.table, traffic.pairs.shape, direction)
            passes[direction] = pool_timeline(
                traffic, attend, self.cluster, direction=direction, tp=self.tp, overlap=self.overlap
            )
        return PoolTimelines(**passes, traffic=traffic)

    def __call__(self, plan: PoolPlan) -> AttentionCost:
        """Seconds and bytes of one plan and layer."""
        lines, memory = self.timelines(plan), pool_memory(plan)
        compute = lines.forward.compute + lines.backward.compute
        return AttentionCost(
            forward_seconds=lines.forward.makespan,
            backward_seconds=lines.backward.makespan,
            compute_seconds=float(compute.max()),
            mean_compute_seconds=float(compute.mean()),
            kept_bytes=float(memory.kept.max()),
            workspace_bytes=float(memory.workspace.max()),
        )


def attend_seconds(
    work: PoolSegments, table: KernelTable, shape: tuple[int, ...], direction: Direction
) -> Seconds:
    """Seconds that each worker computes, [workers, 1 + chunks], from its kernel segments and a
    table for these heads: local work in column 0, chunk c in column c + 1.  `shape` is (workers,
    chunks).

    An attention call, the segments of a worker that wait for one chunk and read the same buffers,
    takes the sum of its segments' seconds and `KernelTable.call_seconds`.
    """
    # Step 1: add up segments by worker and chunk.
    workers, columns = shape[0], 1 + shape[1]
    seconds = table.seconds(work.q_len, work.k_len, work.heads, direction=direction)
    cell = work.worker * columns + work.chunk - LOCAL
    total = np.bincount(cell, weights=seconds, minlength=workers * columns)

    # Step 2: add the seconds of the calls; segments of one cell and equal buffers share a call.
    buffers = (work.q_buffer - LOCAL) * columns + work.kv_buffer - LOCAL
    calls = np.unique(cell * columns**2 + buffers) // columns**2
    total = total + np.bincount(calls, minlength=workers * columns) * table.call_seconds
    return np.asarray(total.reshape(workers, columns))


def pool_timeline(
    traffic: PoolTraffic,
    attend: Seconds,
    cluster: Cluster,
    *,
    direction: Direction,
    tp: int = 1,
    overlap: bool = True,
) -> Timeline:
    """Play the executor's pipeline of one pass, for workers that are `tp` ranks of `cluster` each.

    `attend` are the seconds that each worker computes attention, [workers, 1 + chunks]: work that
    waits for nothing in column 0, work that waits for the dispatch of chunk c in column c + 1.

    Without `overlap` a pass is one chunk: a worker waits for all that is dispatched to it, then
    computes everything, then returns everything.

    Pure.  Longer transfers or slower work never end anything sooner: all times are sums and maxima.

    Raises ValueError for another direction, and for `attend` seconds of another shape, negative or
    not finite.
    """
    dispatched, returned = hops(traffic, direction)
    workers, count = traffic.pairs.shape
    shape_from = "the pool's workers and chunks, and one column of local work"
    attend = check_array("attend", attend, shape=(workers, 1 + count), shape_from=shape_from)
    local, chunks = attend[:, 0], attend[:, 1:]
    if not overlap:
        dispatched, returned = (
            [hop.sum(axis=0, keepdims=True) for hop in way] for way in (dispatched, returned)
        )
        local, chunks = np.zeros_like(local), (local + chunks.sum(axis=1))[:, None]

    # Step 1: the network carries all dispatches, one chunk after the other.
    dispatch = _queue(np.zeros_like(local), np.zeros_like(chunks), dispatched, cluster, tp)

    # Step 2: each worker computes its local work, then the chunks as they arrive.
    attend_spans = Spans(np.empty_like(chunks), np.empty_like(chunks))
    free = local
    for chunk in range(chunks.shape[1]):
        attend_spans.start[:, chunk] = np.maximum(free, dispatch.end[:, chunk])
        attend_spans.end[:, chunk] = free = attend_spans.start[:, chunk] + chunks[:, chunk]

    # Step 3: returns queue behind the dispatches and leave once their chunk is computed.
    return Timeline(
        compute=local + chunks.sum(axis=1),
        local_end=local,
        dispatch=dispatch,
        attend=attend_spans,
        returns=_queue(dispatch.end[:, -1], attend_spans.end, returned, cluster, tp),
    )


def moved_bytes(traffic: PoolTraffic, direction: Direction) -> tuple[IntArray, IntArray]:
    """Bytes that a pass dispatches and returns, int64 [chunks, workers, workers] each."""
    dispatched, returned = hops(traffic, direction)
    return np.sum(dispatched, axis=0), np.sum(returned, axis=0)


def hops(traffic: PoolTraffic, direction: Direction) -> tuple[list[IntArray], list[IntArray]]:
    """Exchanges of each chunk's dispatch and of its return, one after the other.

    Each is the bytes from worker i to worker j, int64 [chunks, workers, workers].
    """
    if direction == "forward":
        return [traffic.dispatched, traffic.passed_on], [traffic.returned]
    if direction == "backward":
        return (
            [traffic.backward_dispatched, traffic.backward_passed_on],
            [traffic.backward_collected, traffic.backward_returned],
        )
    raise ValueError(f"direction is {direction!r}; choose 'forward' or 'backward'")


def _queue(
    free: Seconds, ready: Seconds, moved: list[IntArray], cluster: Cluster, tp: int
) -> Spans:
    """Every chunk's exchanges, for networks that carry one exchange at a time.

    `free` [workers] is when each worker's network is free, `ready` [workers, chunks] when the rows
    are ready to leave.  A chunk's exchanges are its entries in `moved`, one hop after the other.

    For example, `free` = [0, 4] and `ready` = [[1], [2]] and one hop of 10 s from worker 0 to
    worker 1: worker 0 sends from 1 to 11; worker 1 is free at 4 and receives from 4 to 14.
    """
    spans = Spans(np.empty_like(ready), np.empty_like(ready))
    durations = [_exchange_seconds(hop, cluster, tp) for hop in moved]
    for chunk in range(ready.shape[1]):
        now, begun = np.maximum(free, ready[:, chunk]), None
        for hop, seconds in zip(moved, durations, strict=True):
            if hop[chunk].any():
                # A worker receives nothing before its senders have reached the exchange.
                senders = np.where(hop[chunk] > 0, now[:, None], 0)
                now = np.maximum(now, senders.max(axis=0))
                begun = now if begun is None else begun
                now = now + seconds[:, chunk]
        spans.start[:, chunk] = now if begun is None else begun
        spans.end[:, chunk] = free = now
    return spans


def _exchange_seconds(moved: IntArray, cluster: Cluster, tp: int) -> Seconds:
    """Seconds that each worker spends on each chunk's exchange, [workers, chunks]; 0 without one.

    `moved` are the bytes from worker i to worker j, [chunks, workers, workers].
    """
    chunks, workers, _ = moved.shape
    # Worker 0 is the first of its node; with 4 workers a node, workers 0-3 share one, 4-7 the next.
    node = np.arange(workers) // cluster.workers_per_node(tp)
    same_node = node[:, None] == node[None, :]
    seconds = np.zeros((chunks, workers), dtype=np.float64)
    for link, bandwidth in ((same_node, cluster.within_node), (~same_node, cluster.between_nodes)):
        over_link = np.where(link, moved, 0)
        # A link sends and receives at the same time: the larger of both counts.
        busiest = np.maximum(over_link.sum(axis=1), over_link.sum(axis=2))
        seconds = np.maximum(seconds, busiest / (bandwidth * cluster.collective_efficiency))
    moves = moved.reshape(chunks, -1).any(axis=1)
    # A chunk that moves nothing is never posted, and takes no latency.
    latency = np.where(moves, cluster.between_nodes_latency, 0.0)
    return np.asarray((seconds + latency[:, None]).T)
