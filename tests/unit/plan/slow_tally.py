"""A pool's counts the slow way: from the rank_plan of each worker, the very thing that the run time
executes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from libra.data.lengths import causal_pairs
from libra.plan.attention_calls import LOCAL
from libra.plan.plan_pool import PoolPlan
from libra.plan.rank_plan import RankPlan, make_rank_plan
from libra.plan.traffic import PoolTraffic

Segment = tuple[int, ...]
"""Worker, chunk, q buffer, kv buffer, q_len, k_len, heads, kv_heads."""


def all_routes(plan: PoolPlan) -> list[RankPlan]:
    return [make_rank_plan(plan, worker) for worker in range(plan.workers)]


def slow_work(rank_plans: list[RankPlan]) -> Counter[Segment]:
    """Every segment that is launched."""
    return Counter(
        (
            rank_plan.worker,
            launch.chunk,
            launch.q_buffer,
            launch.kv_buffer,
            int(q_len),
            int(k_len),
            launch.heads,
            launch.kv_heads,
        )
        for rank_plan in rank_plans
        for launch in rank_plan.calls
        for q_len, k_len in zip(launch.q_len, launch.k_len, strict=True)
    )


def slow_tally(plan: PoolPlan, rank_plans: list[RankPlan]) -> PoolTraffic:
    """What the rank_plans move, compute and hold; the order of the executor's passes, step by step."""
    workers, head_groups, heads = plan.workers, plan.head_groups, plan.heads
    q_row = head_groups.heads * heads.dim * heads.bytes
    k_row = head_groups.kv_heads * heads.dim * heads.bytes
    v_row = head_groups.kv_heads * heads.value_dim * heads.bytes
    o_row = head_groups.heads * heads.value_dim * heads.bytes
    moved = np.zeros((7, head_groups.chunks, workers, workers), dtype=np.int64)
    dispatched, relayed, returned = moved[:3]
    back_dispatched, back_relayed, back_collected, back_returned = moved[3:]
    traffic = PoolTraffic(
        local_pairs=np.zeros(workers, dtype=np.int64),
        pairs=np.zeros((workers, head_groups.chunks), dtype=np.int64),
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
    for rank_plan in rank_plans:
        worker = rank_plan.worker
        for chunk in range(head_groups.chunks):
            q, kv, assembly = rank_plan.q[chunk], rank_plan.kv[chunk], rank_plan.kv_buffers[chunk]
            fetched = q.send_splits * q_row + kv.send_splits * (k_row + v_row)
            dispatched[chunk, worker] = fetched
            passed_on = rank_plan.kv_multicast[chunk].send_splits * (k_row + v_row)
            relayed[chunk, worker] = passed_on
            returned[chunk, worker] = q.recv_splits * o_row  # back the way Q came
            back_dispatched[chunk, worker] = q.send_splits * o_row
            if plan.config.backward == "refetch":
                back_dispatched[chunk, worker] += fetched
                back_relayed[chunk, worker] = passed_on
            back_returned[chunk, worker] = q.recv_splits * q_row
            for buffer, done in enumerate(rank_plan.kv_done):
                if done == chunk:
                    partial = rank_plan.kv_multicast[buffer].recv_splits
                    back_collected[chunk, worker] += partial * (k_row + v_row)
                    partial = rank_plan.kv[buffer].recv_splits
                    back_returned[chunk, worker] += partial * (k_row + v_row)
            traffic.fetched_q[worker] += q.received * q_row
            traffic.fetched_kv[worker] += assembly.rows * (k_row + v_row)
            traffic.remote_o[worker] += q.received * o_row
        for launch in rank_plan.calls:
            work = launch
            pairs = int(causal_pairs(work.k_len - work.q_len, work.k_len).sum()) * work.heads
            if launch.chunk == LOCAL:
                traffic.local_pairs[worker] += pairs
            else:
                traffic.pairs[worker, launch.chunk] += pairs
            traffic.segments[worker] += len(work)
            traffic.launches[worker] += 1
    return traffic
