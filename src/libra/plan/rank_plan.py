"""One worker's share of a plan: the rows it sends and receives chunk by chunk, and the kernel
segments it computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.all_to_all import AllToAll, Assembly, kv_messages, last_reader, q_messages
from libra.plan.attention_calls import LOCAL, Launch, worker_launches
from libra.plan.geometry import spread
from libra.plan.head_groups import HeadGroups
from libra.plan.plan_pool import PoolPlan

__all__ = ["LOCAL", "AllToAll", "Assembly", "Launch", "RankPlan", "make_rank_plan"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """All that one worker does for a plan, in every layer."""

    worker: int
    workers: int
    rows: int
    """Local rows of q, k and v."""
    padding: IntArray
    """Local rows that belong to no sample: their output is zero."""
    head_groups: HeadGroups
    q: tuple[AllToAll, ...]
    """Per chunk; outputs return along the same rows."""
    kv: tuple[AllToAll, ...]
    """K and V from those who hold them."""
    relay: tuple[AllToAll, ...]
    """K and V that have arrived at one who needs them and that others need too."""
    assembly: tuple[Assembly, ...]
    kv_done: tuple[int, ...]
    """Last chunk that reads each kv buffer, on any worker: its gradients return after it."""
    launches: tuple[Launch, ...]

    @property
    def lse_size(self) -> int:
        """Elements of the flat LSE over all launches."""
        return sum(launch.segments.lse_size for launch in self.launches)


def make_rank_plan(plan: PoolPlan, worker: int) -> RankPlan:
    """Derive worker `worker`'s rank_plan from the plan."""
    geometry = plan.geometry
    q, q_start = q_messages(plan, worker)
    keys = kv_messages(plan, worker)
    mine = geometry.block_worker == worker
    padding = np.ones(geometry.rows[worker], dtype=np.bool_)
    padding[
        spread(geometry.block_local[mine], (geometry.block_stop - geometry.block_start)[mine])
    ] = False
    return RankPlan(
        worker=worker,
        workers=plan.workers,
        rows=int(geometry.rows[worker]),
        padding=np.flatnonzero(padding),
        head_groups=plan.head_groups,
        q=q,
        kv=keys.kv,
        relay=keys.relay,
        assembly=keys.assembly,
        kv_done=last_reader(plan.head_groups),
        launches=worker_launches(plan, worker, q_start, keys.start),
    )
