"""Predicted seconds of one layer's attention in a pool; what a replay measures of every plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from libra.cost.attend import attend_seconds
from libra.cost.hardware import Cluster
from libra.cost.kernel_table import KernelTable
from libra.cost.timeline import Direction, Seconds, pool_timeline
from libra.plan.memory import pool_memory
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import PoolTraffic, pool_traffic
from libra.plan.work import pool_work

_MOVED: Final = (
    "dispatched",
    "relayed",
    "returned",
    "backward_dispatched",
    "backward_relayed",
    "backward_collected",
    "backward_returned",
)
"""Bytes of a `PoolTraffic`, [chunks, workers, workers]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTime:
    """Times a plan on a cluster: kernel segments by a table, exchanges by the plan's own bytes."""

    cluster: Cluster
    table: KernelTable
    """For the head dims of the plans."""

    tp: int = 1
    """Tensor-parallel ranks that make up a worker."""

    overlap: bool = True
    """False waits for the whole dispatch, then attends, then returns: no pipeliner."""

    def __call__(self, plan: PoolPlan) -> dict[str, float]:
        """Figures of one plan and layer, in seconds and bytes.

        `forward_seconds`, `backward_seconds`: until the pool's last worker has all that it gets.
        `compute_seconds`: both passes' attention of the busiest worker.
        `mean_compute_seconds`: the same of the mean worker.
        `kept_bytes`: most that a worker keeps of others, or for them, until the backward.
        `workspace_bytes`: most that a worker takes for one call at a time.
        """
        work = pool_work(plan)
        traffic, memory = pool_traffic(plan, work), pool_memory(plan)
        chunks = plan.head_groups.chunks
        rates = self.cluster.time_model(self.table.peak_flops, tp=self.tp)
        ends: dict[Direction, float] = {}
        compute = np.zeros(plan.workers)
        directions: tuple[Direction, ...] = ("forward", "backward")
        for direction in directions:
            attend = attend_seconds(
                work, self.table, workers=plan.workers, chunks=chunks, direction=direction
            )
            compute += attend[0] + attend[1].sum(axis=1)
            played = traffic
            if not self.overlap:
                played, attend = _one_after_the_other(traffic, attend)
            line = pool_timeline(played, plan.heads, rates, direction=direction, attend=attend)
            ends[direction] = line.makespan
        return {
            "forward_seconds": ends["forward"],
            "backward_seconds": ends["backward"],
            "compute_seconds": float(compute.max()),
            "mean_compute_seconds": float(compute.mean()),
            "kept_bytes": float(memory.kept.max()),
            "workspace_bytes": float(memory.workspace.max()),
        }


def _one_after_the_other(
    traffic: PoolTraffic, attend: tuple[Seconds, Seconds]
) -> tuple[PoolTraffic, tuple[Seconds, Seconds]]:
    """The same counts as one chunk, for whose arrival all work waits."""
    local, chunks = attend
    whole = replace(
        traffic,
        local_pairs=np.zeros_like(traffic.local_pairs),
        pairs=(traffic.local_pairs + traffic.pairs.sum(axis=1))[:, None],
        **{way: getattr(traffic, way).sum(axis=0)[None] for way in _MOVED},
    )
    return whole, (np.zeros_like(local), (local + chunks.sum(axis=1))[:, None])
