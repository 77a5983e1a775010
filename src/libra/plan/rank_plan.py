"""One worker's share of a plan: the rows that it sends and receives, chunk by chunk, and the kernel
calls that it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libra.data.lengths import IntArray
from libra.plan.all_to_all import AllToAll, KVBuffer, kv_all_to_alls, q_all_to_alls
from libra.plan.attention_calls import AttentionCall, worker_calls
from libra.plan.geometry import spread
from libra.plan.head_groups import HeadGroups
from libra.plan.memory import CallMemory, worker_memory
from libra.plan.pool_plan import PoolPlan


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
    """Of each chunk; outputs return along the same rows."""
    kv: tuple[AllToAll, ...]
    """K and V from the workers that hold them."""
    kv_multicast: tuple[AllToAll, ...]
    """K and V that one worker has fetched and passes on to others."""
    kv_buffers: tuple[KVBuffer, ...]
    kv_done: tuple[int, ...]
    """Last chunk that reads each kv buffer, on any worker: its gradients return after it."""
    calls: tuple[AttentionCall, ...]
    memory: CallMemory[int]
    """Elements that a layer's calls allocate."""

    @property
    def lse_size(self) -> int:
        """Elements of the flat LSE over all calls."""
        return sum(call.lse_size for call in self.calls)


def make_rank_plan(plan: PoolPlan, worker: int) -> RankPlan:
    """Derive one worker's share of a plan."""
    geometry = plan.geometry
    kv, kv_multicast, kv_buffers = kv_all_to_alls(plan, worker)
    mine = geometry.block_worker == worker
    filled = spread(geometry.block_local[mine], (geometry.block_stop - geometry.block_start)[mine])
    return RankPlan(
        worker=worker,
        workers=plan.workers,
        rows=int(geometry.rows[worker]),
        padding=np.delete(np.arange(geometry.rows[worker]), filled),
        head_groups=plan.head_groups,
        q=q_all_to_alls(plan, worker),
        kv=kv,
        kv_multicast=kv_multicast,
        kv_buffers=kv_buffers,
        kv_done=plan.head_groups.kv_done,
        calls=worker_calls(plan, worker),
        memory=worker_memory(plan, worker),
    )
