"""A pool's counts the slow way: from the rank plan of each worker, which the runtime executes."""

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


def all_rank_plans(plan: PoolPlan) -> list[RankPlan]:
    return [make_rank_plan(plan, worker) for worker in range(plan.workers)]


def slow_segments(rank_plans: list[RankPlan]) -> Counter[Segment]:
    """Every segment that is called."""
    return Counter(
        (
            rank_plan.worker,
            call.chunk,
            call.q_buffer,
            call.kv_buffer,
            int(q_len),
            int(k_len),
            call.heads,
            call.kv_heads,
        )
        for rank_plan in rank_plans
        for call in rank_plan.calls
        for q_len, k_len in zip(call.q_len, call.k_len, strict=True)
    )


def slow_traffic(plan: PoolPlan, rank_plans: list[RankPlan]) -> PoolTraffic:
    """Bytes and pairs that rank plans move, compute and hold, in the order of the passes."""
    workers, head_groups, heads = plan.workers, plan.head_groups, plan.heads
    q_row = head_groups.heads * heads.dim * heads.bytes
    k_row = head_groups.kv_heads * heads.dim * heads.bytes
    v_row = head_groups.kv_heads * heads.value_dim * heads.bytes
    o_row = head_groups.heads * heads.value_dim * heads.bytes
    moved = np.zeros((7, head_groups.chunks, workers, workers), dtype=np.int64)
    dispatched, passed_on, returned = moved[:3]
    back_dispatched, back_passed_on, back_collected, back_returned = moved[3:]
    traffic = PoolTraffic(
        local_pairs=np.zeros(workers, dtype=np.int64),
        pairs=np.zeros((workers, head_groups.chunks), dtype=np.int64),
        dispatched=dispatched,
        passed_on=passed_on,
        returned=returned,
        backward_dispatched=back_dispatched,
        backward_passed_on=back_passed_on,
        backward_collected=back_collected,
        backward_returned=back_returned,
        fetched_q=np.zeros(workers, dtype=np.int64),
        fetched_kv=np.zeros(workers, dtype=np.int64),
        peer_out=np.zeros(workers, dtype=np.int64),
        segments=np.zeros(workers, dtype=np.int64),
        calls=np.zeros(workers, dtype=np.int64),
    )
    for rank_plan in rank_plans:
        worker = rank_plan.worker
        for chunk in range(head_groups.chunks):
            q, kv, kv_buffer = rank_plan.q[chunk], rank_plan.kv[chunk], rank_plan.kv_buffers[chunk]
            fetched = q.send_splits * q_row + kv.send_splits * (k_row + v_row)
            dispatched[chunk, worker] = fetched
            multicast = rank_plan.kv_multicast[chunk].send_splits * (k_row + v_row)
            passed_on[chunk, worker] = multicast
            returned[chunk, worker] = q.recv_splits * o_row  # back the way Q came
            back_dispatched[chunk, worker] = q.send_splits * o_row
            if plan.config.backward == "refetch":
                back_dispatched[chunk, worker] += fetched
                back_passed_on[chunk, worker] = multicast
            back_returned[chunk, worker] = q.recv_splits * q_row
            for buffer, done in enumerate(rank_plan.kv_done):
                if done == chunk:
                    partial = rank_plan.kv_multicast[buffer].recv_splits
                    back_collected[chunk, worker] += partial * (k_row + v_row)
                    partial = rank_plan.kv[buffer].recv_splits
                    back_returned[chunk, worker] += partial * (k_row + v_row)
            traffic.fetched_q[worker] += q.received * q_row
            traffic.fetched_kv[worker] += kv_buffer.rows * (k_row + v_row)
            traffic.peer_out[worker] += q.received * o_row
        for call in rank_plan.calls:
            pairs = int(causal_pairs(call.k_len - call.q_len, call.k_len).sum()) * call.heads
            if call.chunk == LOCAL:
                traffic.local_pairs[worker] += pairs
            else:
                traffic.pairs[worker, call.chunk] += pairs
            traffic.segments[worker] += len(call)
            traffic.calls[worker] += 1
    return traffic
