"""Predicted seconds of one layer's attention in a pool, for `libra plan` and `libra simulate`.

plan ──> kernel segments ── kernel table ──> seconds of each worker and chunk ─┐
  └────> bytes of every exchange ── links of the cluster ──────────────────────┴─> Timeline
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from libra.cost.hardware import Cluster
from libra.cost.kernel_table import DIRECTIONS, Direction, KernelTable
from libra.cost.timeline import Seconds, Timeline, pool_timeline
from libra.plan.attention_calls import LOCAL, PoolSegments, pool_segments
from libra.plan.memory import pool_memory
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import PoolTraffic, pool_traffic


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
        play = partial(
            pool_timeline, traffic, cluster=self.cluster, tp=self.tp, overlap=self.overlap
        )
        passes = {
            direction: play(
                attend=attend_seconds(work, self.table, traffic.pairs.shape, direction),
                direction=direction,
            )
            for direction in DIRECTIONS
        }
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
    """Seconds that each worker computes, [workers, 1 + chunks], from its kernel segments and a table
    for these heads: local work in column 0, chunk c in column c + 1.  `shape` is workers, chunks.

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
