"""What every worker of a pool computes, moves and holds, chunk by chunk, counted from its route.

Routes are what the run time executes, so these are its figures, not an estimate of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.plan import PoolPlan
from libra.plan.route import LOCAL, worker_route
from libra.workload import causal_pairs

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolTally:
    """Counts of one forward pass of one layer; all int64, bytes as they lie in the tensors."""

    local_pairs: IntArray
    """Query-key pairs times heads that wait for nothing, [workers]."""
    pairs: IntArray
    """Query-key pairs times heads of each chunk, [workers, chunks]."""
    dispatched: IntArray
    """Bytes of Q, K and V from worker i to worker j, [chunks, workers, workers]."""
    returned: IntArray
    """Bytes of O from worker i to worker j, [chunks, workers, workers]."""
    fetched_q: IntArray
    """Bytes that hold other workers' Q, [workers]."""
    fetched_kv: IntArray
    """Bytes that hold K and V from elsewhere, assembled ranges included, [workers]."""
    remote_o: IntArray
    """Bytes that hold outputs computed for other workers, [workers]."""
    segments: IntArray
    """Kernel segments over all launches, [workers]."""
    launches: IntArray
    """Kernel calls, [workers]."""

    @property
    def extra_memory(self) -> IntArray:
        """Bytes a worker holds beyond its own q, k, v and out while a layer runs, [workers].

        The send and return buffers of transfers under way come on top.
        """
        return self.fetched_q + self.fetched_kv + self.remote_o


def pool_tally(plan: PoolPlan) -> PoolTally:
    """Count a plan worker by worker; routes are made and dropped one at a time."""
    workers, lanes, heads = plan.workers, plan.lanes, plan.heads
    tally = PoolTally(
        local_pairs=np.zeros(workers, dtype=np.int64),
        pairs=np.zeros((workers, lanes.chunks), dtype=np.int64),
        dispatched=np.zeros((lanes.chunks, workers, workers), dtype=np.int64),
        returned=np.zeros((lanes.chunks, workers, workers), dtype=np.int64),
        fetched_q=np.zeros(workers, dtype=np.int64),
        fetched_kv=np.zeros(workers, dtype=np.int64),
        remote_o=np.zeros(workers, dtype=np.int64),
        segments=np.zeros(workers, dtype=np.int64),
        launches=np.zeros(workers, dtype=np.int64),
    )
    q_row = lanes.heads * heads.dim * heads.bytes
    kv_row = lanes.kv_heads * (heads.dim + heads.value_dim) * heads.bytes
    o_row = lanes.heads * heads.value_dim * heads.bytes
    for worker in range(workers):
        route = worker_route(plan, worker)
        for chunk in range(lanes.chunks):
            q, kv, assembly = route.q[chunk], route.kv[chunk], route.assembly[chunk]
            tally.dispatched[chunk, worker] = q.send_counts * q_row + kv.send_counts * kv_row
            tally.returned[chunk, worker] = q.recv_counts * o_row  # back the way Q came
            tally.fetched_q[worker] += q.received * q_row
            tally.fetched_kv[worker] += assembly.rows * kv_row
            tally.remote_o[worker] += q.received * o_row
        for launch in route.launches:
            work = launch.segments
            pairs = int(causal_pairs(work.k_len - work.q_len, work.k_len).sum()) * work.heads
            if launch.chunk == LOCAL:
                tally.local_pairs[worker] += pairs
            else:
                tally.pairs[worker, launch.chunk] += pairs
            tally.segments[worker] += len(work)
            tally.launches[worker] += 1
    return tally
