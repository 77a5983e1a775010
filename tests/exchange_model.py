"""The runtime's exchange with identities in place of numbers.

Every row carries who it is: a query row of one head is `position * heads + head`, positions counted
over the pool, and so is a key row.  Sending, receiving and assembling them as the executor does
shows what each kernel call would read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.data.cp_shards import local_positions
from libra.plan.all_to_all import AllToAll
from libra.plan.attention_calls import LOCAL, AttentionCall
from libra.plan.plan_pool import PoolPlan
from libra.plan.rank_plan import RankPlan, make_rank_plan
from tests.slow_planner import sample_tables

IntArray = NDArray[np.int64]

NOTHING = -1
"""In a buffer row that nothing was written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What every worker holds after all chunks have arrived."""

    rank_plans: list[RankPlan]
    positions: list[IntArray]
    """Pool position of each local row, per worker."""
    q_local: list[IntArray]
    """[rows, query heads], per worker."""
    k_local: list[IntArray]
    """[rows, key/value heads], per worker."""
    q_fetched: list[list[IntArray]]
    """[received, heads of a head_group], per worker and chunk."""
    k_arrived: list[list[IntArray]]
    """[received, key/value heads of a head_group], per worker and chunk."""
    k_fetched: list[list[IntArray]]
    """[rows of the kv buffer, key/value heads of a head_group], per worker and chunk."""
    q_traffic: IntArray
    """Query heads' rows from worker i to worker j, [workers, workers]."""
    k_traffic: IntArray


def exchange(plan: PoolPlan) -> Exchange:
    """Run a plan's messages between all its workers."""
    rank_plans = [make_rank_plan(plan, worker) for worker in range(plan.workers)]
    positions = []
    for worker in range(plan.workers):
        pack, rank = divmod(worker, plan.cp_size)
        rows = local_positions(plan.tokens, plan.cp_size, rank, plan.config.shard_layout)
        positions.append(rows + pack * plan.tokens)
    q_local = [at[:, None] * plan.heads.q + np.arange(plan.heads.q) for at in positions]
    k_local = [at[:, None] * plan.heads.kv + np.arange(plan.heads.kv) for at in positions]
    q_fetched: list[list[IntArray]] = [[] for _ in rank_plans]
    k_arrived: list[list[IntArray]] = [[] for _ in rank_plans]
    k_fetched: list[list[IntArray]] = [[] for _ in rank_plans]
    q_traffic = np.zeros((plan.workers, plan.workers), dtype=np.int64)
    k_traffic = np.zeros_like(q_traffic)
    for chunk in range(plan.config.chunks):
        head_groups = plan.head_groups
        messages = [rank_plan.q[chunk] for rank_plan in rank_plans]
        arrived = all_to_all(messages, [rows.reshape(-1, head_groups.heads) for rows in q_local])
        q_traffic += np.stack([m.send_splits for m in messages]) * head_groups.heads
        for worker, rows in enumerate(arrived):
            q_fetched[worker].append(rows)

        messages = [rank_plan.kv[chunk] for rank_plan in rank_plans]
        head_group_rows = [rows.reshape(-1, head_groups.kv_heads) for rows in k_local]
        arrived = all_to_all(messages, head_group_rows)
        k_traffic += np.stack([m.send_splits for m in messages]) * head_groups.kv_heads
        messages = [rank_plan.kv_multicast[chunk] for rank_plan in rank_plans]
        passed_on = all_to_all(messages, arrived)
        k_traffic += np.stack([m.send_splits for m in messages]) * head_groups.kv_heads
        arrived = [np.concatenate(both) for both in zip(arrived, passed_on, strict=True)]
        for worker, rows in enumerate(arrived):
            kv_buffer = rank_plans[worker].kv_buffers[chunk]
            landed = np.concatenate([rows, head_group_rows[worker][kv_buffer.own_index]])
            buffer = np.full((kv_buffer.rows, head_groups.kv_heads), NOTHING, dtype=np.int64)
            buffer[slice(None) if kv_buffer.permutation is None else kv_buffer.permutation] = landed
            k_arrived[worker].append(rows)
            k_fetched[worker].append(buffer)
    return Exchange(
        rank_plans=rank_plans,
        positions=positions,
        q_local=q_local,
        k_local=k_local,
        q_fetched=q_fetched,
        k_arrived=k_arrived,
        k_fetched=k_fetched,
        q_traffic=q_traffic,
        k_traffic=k_traffic,
    )


def all_to_all(messages: Sequence[AllToAll], rows: Sequence[IntArray]) -> list[IntArray]:
    """What each worker receives, ordered by sender; both sides must agree on every count."""
    sent = np.stack([message.send_splits for message in messages])
    expected = np.stack([message.recv_splits for message in messages])
    assert np.array_equal(sent, expected.T)
    assert (np.diag(sent) == 0).all(), "what is local must not travel"
    assert {message.moves for message in messages} == {bool(sent.any())}
    parts = []
    for message, local in zip(messages, rows, strict=True):
        assert len(message.send_index) == message.send_splits.sum()
        parts.append(np.split(local[message.send_index], np.cumsum(message.send_splits)[:-1]))
    return [np.concatenate([part[worker] for part in parts]) for worker in range(len(messages))]


def sample_of_position(plan: PoolPlan) -> tuple[IntArray, IntArray]:
    """Sample of every pool position (NOTHING in padding), and its position in that sample."""
    sample = np.full(len(plan.cu_seqlens) * plan.tokens, NOTHING)
    within = np.full_like(sample, NOTHING)
    tables = sample_tables([cu.tolist() for cu in plan.cu_seqlens])
    for pack, table in enumerate(tables):
        for token, (index, position) in table.items():
            sample[pack * plan.tokens + token] = index
            within[pack * plan.tokens + token] = position
    return sample, within


def segments(call: AttentionCall) -> list[tuple[slice, slice, slice, slice]]:
    """Rows and heads of q, rows and heads of k, of each segment."""
    columns = (call.q_start, call.q_len, call.k_start, call.k_len, call.q_head, call.kv_head)
    return [
        (
            slice(q, q + q_len),
            slice(head, head + call.heads),
            slice(k, k + k_len),
            slice(kv_head, kv_head + call.kv_heads),
        )
        for q, q_len, k, k_len, head, kv_head in np.stack(columns, axis=1).tolist()
    ]


def buffers(moved: Exchange, worker: int, call: AttentionCall) -> tuple[IntArray, IntArray]:
    """The q and k buffers that a call reads."""
    q = moved.q_local if call.q_buffer == LOCAL else None
    k = moved.k_local if call.kv_buffer == LOCAL else None
    return (
        moved.q_fetched[worker][call.q_buffer] if q is None else q[worker],
        moved.k_fetched[worker][call.kv_buffer] if k is None else k[worker],
    )
