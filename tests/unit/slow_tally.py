"""A pool's counts the slow way: from the route of each worker, the very thing that the run time
executes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from libra.plan.plan import PoolPlan
from libra.plan.route import LOCAL, Route, worker_route
from libra.plan.tally import PoolTally
from libra.workload import causal_pairs

Segment = tuple[int, ...]
"""Worker, chunk, q buffer, kv buffer, q_len, k_len, heads, kv_heads."""


def all_routes(plan: PoolPlan) -> list[Route]:
    return [worker_route(plan, worker) for worker in range(plan.workers)]


def slow_work(routes: list[Route]) -> Counter[Segment]:
    """Every segment that is launched."""
    return Counter(
        (
            route.worker,
            launch.chunk,
            launch.q_buffer,
            launch.kv_buffer,
            int(q_len),
            int(k_len),
            launch.segments.heads,
            launch.segments.kv_heads,
        )
        for route in routes
        for launch in route.launches
        for q_len, k_len in zip(launch.segments.q_len, launch.segments.k_len, strict=True)
    )


def slow_tally(plan: PoolPlan, routes: list[Route]) -> PoolTally:
    """What the routes move, compute and hold; the order of the executor's passes, step by step."""
    workers, lanes, heads = plan.workers, plan.lanes, plan.heads
    q_row = lanes.heads * heads.dim * heads.bytes
    k_row = lanes.kv_heads * heads.dim * heads.bytes
    v_row = lanes.kv_heads * heads.value_dim * heads.bytes
    o_row = lanes.heads * heads.value_dim * heads.bytes
    moved = np.zeros((7, lanes.chunks, workers, workers), dtype=np.int64)
    dispatched, relayed, returned = moved[:3]
    back_dispatched, back_relayed, back_collected, back_returned = moved[3:]
    tally = PoolTally(
        local_pairs=np.zeros(workers, dtype=np.int64),
        pairs=np.zeros((workers, lanes.chunks), dtype=np.int64),
        dispatched=dispatched,
        relayed=relayed,
        returned=returned,
        backward_dispatched=back_dispatched,
        backward_relayed=back_relayed,
        backward_collected=back_collected,
        backward_returned=back_returned,
        fetched_q=np.zeros(workers, dtype=np.int64),
        fetched_kv=np.zeros(workers, dtype=np.int64),
        remote_o=np.zeros(workers, dtype=np.int64),
        segments=np.zeros(workers, dtype=np.int64),
        launches=np.zeros(workers, dtype=np.int64),
    )
    for route in routes:
        worker = route.worker
        for chunk in range(lanes.chunks):
            q, kv, assembly = route.q[chunk], route.kv[chunk], route.assembly[chunk]
            fetched = q.send_counts * q_row + kv.send_counts * (k_row + v_row)
            dispatched[chunk, worker] = fetched
            passed_on = route.relay[chunk].send_counts * (k_row + v_row)
            relayed[chunk, worker] = passed_on
            returned[chunk, worker] = q.recv_counts * o_row  # back the way Q came
            back_dispatched[chunk, worker] = q.send_counts * o_row
            if plan.config.backward == "refetch":
                back_dispatched[chunk, worker] += fetched
                back_relayed[chunk, worker] = passed_on
            back_returned[chunk, worker] = q.recv_counts * q_row
            for buffer, done in enumerate(route.kv_done):
                if done == chunk:
                    partial = route.relay[buffer].recv_counts
                    back_collected[chunk, worker] += partial * (k_row + v_row)
                    partial = route.kv[buffer].recv_counts
                    back_returned[chunk, worker] += partial * (k_row + v_row)
            tally.fetched_q[worker] += q.received * q_row
            tally.fetched_kv[worker] += assembly.rows * (k_row + v_row)
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
