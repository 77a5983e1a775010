"""One worker's share of a plan: the rows it sends and receives chunk by chunk, and the kernel
segments it computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.geometry import spread
from libra.plan.lanes import Lanes
from libra.plan.launches import LOCAL, Launch, worker_launches
from libra.plan.messages import Assembly, Message, kv_messages, last_reader, q_messages
from libra.plan.plan import PoolPlan

__all__ = ["LOCAL", "Assembly", "Launch", "Message", "Route", "worker_route"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """All that one worker does for a plan, in every layer."""

    worker: int
    workers: int
    rows: int
    """Local rows of q, k and v."""
    padding: IntArray
    """Local rows that belong to no sample: their output is zero."""
    lanes: Lanes
    q: tuple[Message, ...]
    """Per chunk; outputs return along the same rows."""
    kv: tuple[Message, ...]
    """K and V from those who hold them."""
    relay: tuple[Message, ...]
    """K and V that have arrived at one who needs them and that others need too."""
    assembly: tuple[Assembly, ...]
    kv_done: tuple[int, ...]
    """Last chunk that reads each kv buffer, on any worker: its gradients return after it."""
    launches: tuple[Launch, ...]

    @property
    def lse_size(self) -> int:
        """Elements of the flat LSE over all launches."""
        return sum(launch.segments.lse_size for launch in self.launches)


def worker_route(plan: PoolPlan, worker: int) -> Route:
    """Derive worker `worker`'s route from the plan."""
    geometry = plan.geometry
    q, q_start = q_messages(plan, worker)
    keys = kv_messages(plan, worker)
    mine = geometry.block_worker == worker
    padding = np.ones(geometry.rows[worker], dtype=np.bool_)
    padding[
        spread(geometry.block_local[mine], (geometry.block_stop - geometry.block_start)[mine])
    ] = False
    return Route(
        worker=worker,
        workers=plan.workers,
        rows=int(geometry.rows[worker]),
        padding=np.flatnonzero(padding),
        lanes=plan.lanes,
        q=q,
        kv=keys.kv,
        relay=keys.relay,
        assembly=keys.assembly,
        kv_done=last_reader(plan.lanes),
        launches=worker_launches(plan, worker, q_start, keys.start),
    )
