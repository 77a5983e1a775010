"""Kernel calls read exactly the rows they should, shown with rows that carry their identity."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from libra.config import HeadShape, Placement, PoolConfig, ShardLayout
from libra.data.packing import pack_sequential
from libra.plan.attention_calls import LOCAL, pool_segments, worker_calls
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.rank_plan import make_rank_plan
from tests.exchange_model import NOTHING, buffers, exchange, sample_of_position, segments
from tests.pools import SmallPool, small_pools

pytestmark = pytest.mark.usefixtures("eager_multicasts")

IntArray = NDArray[np.int64]


DATA = Path(__file__).parents[2] / "data"


any_pool = small_pools(placements=("paper", "surplus", "ulysses"))


def check_segment(plan: PoolPlan, q: IntArray, k: IntArray, where: IntArray) -> None:
    """One segment's queries [rows, heads] must read exactly their causal keys [rows, kv heads]."""
    sample, within = where
    q_at, q_head = np.divmod(q, plan.heads.q)
    k_at, k_head = np.divmod(k, plan.heads.kv)
    assert (q_at == q_at[0, 0] + np.arange(len(q))[:, None]).all()
    assert (k_at == k_at[0, 0] + np.arange(len(k))[:, None]).all()
    assert (q_head == q_head[0, 0] + np.arange(q.shape[1])).all()
    assert (k_head == k_head[0]).all()
    assert within[k_at[0, 0]] == 0, "keys start where their sample starts"
    assert k_at[-1, 0] == q_at[-1, 0], "keys end at the last query"
    assert sample[k_at[0, 0]] == sample[k_at[-1, 0]] != NOTHING
    assert k_at[0, 0] <= q_at[0, 0], "queries lie in the same sample"
    assert q.shape[1] % k.shape[1] == 0
    reads = k_head[0][np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])]
    assert (reads == q_head[0] // plan.heads.group).all()


def check_attention(plan: PoolPlan) -> None:
    """All calls of all workers together are the pool's attention, each query and head once."""
    moved, where = exchange(plan), np.stack(sample_of_position(plan))
    computed = np.zeros((len(where[0]), plan.heads.q), dtype=np.int64)
    pairs = np.zeros(plan.workers, dtype=np.int64)
    for worker, rank_plan in enumerate(moved.rank_plans):
        answered = [np.zeros(rows.shape, dtype=np.int64) for rows in moved.q_fetched[worker]]
        for call in rank_plan.calls:
            q_buffer, k_buffer = buffers(moved, worker, call)
            assert len(call) > 0
            for q_rows, q_heads, k_rows, k_heads in segments(call):
                q, k = q_buffer[q_rows, q_heads], k_buffer[k_rows, k_heads]
                assert q.shape == (q_rows.stop - q_rows.start, call.heads)
                assert k.shape == (k_rows.stop - k_rows.start, call.kv_heads)
                check_segment(plan, q, k, where)
                assert call.kv_buffer <= call.chunk
                np.add.at(computed.ravel(), q.ravel(), 1)
                pairs[worker] += (where[1][q // plan.heads.q] + 1).sum()
                if call.q_buffer != LOCAL:
                    answered[call.q_buffer][q_rows, q_heads] += 1
        assert all((count == 1).all() for count in answered), "each fetched query has one answer"
    real = where[0] != NOTHING
    assert (computed[real] == 1).all(), "each query and head is computed once in the pool"
    assert (computed[~real] == 0).all()
    assert pairs.tolist() == plan.load.tolist()


@settings(max_examples=40)
@given(any_pool)
def test_every_segment_reads_exactly_its_queries_and_their_causal_keys(pool: SmallPool) -> None:
    check_attention(pool.plan())


@pytest.mark.parametrize(
    "heads, head_shards, chunks",
    [
        (HeadShape(q=6, kv=3, dim=2), 2, 1),  # a shard of one group and a half
        (HeadShape(q=6, kv=3, dim=2), 2, 3),
        (HeadShape(q=6, kv=2, dim=2), 3, 2),  # shards that read one kv head in different chunks
        (HeadShape(q=8, kv=1, dim=2), 4, 2),
        (HeadShape(q=12, kv=4, dim=2), 2, 3),
    ],
)
@pytest.mark.parametrize("cp_size", [1, 3])
def test_so_it_is_where_shards_and_chunks_split_query_groups(
    heads: HeadShape, head_shards: int, chunks: int, cp_size: int
) -> None:
    config = PoolConfig(
        pool_size=2, block_size=5, head_shards=head_shards, chunks=chunks, placement="paper"
    )
    plan = plan_pool([[0, 21, 24], [0, 2, 4, 24]], cp_size=cp_size, config=config, heads=heads)
    for shift in range(plan.shards):  # every shard at home, and every mix of shards away
        moved = np.arange(len(plan.assignment)) % (plan.shards + 1) == shift
        home = np.repeat(plan.geometry.block_worker, plan.shards)
        for away in (moved, ~moved):
            assignment = np.where(away, (home + 1) % plan.workers, home).astype(np.int32)
            check_attention(replace(plan, assignment=assignment))


@pytest.mark.parametrize("placement", ["paper", "surplus", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_so_it_is_for_real_lengths(placement: Placement, layout: ShardLayout) -> None:
    lengths = np.load(DATA / "lengths-code.npy")
    packs = pack_sequential(lengths[lengths <= 4096][:60], 4096)
    config = PoolConfig(
        pool_size=1 if placement == "ulysses" else 3,
        block_size=700,
        head_shards=2,
        chunks=2,
        placement=placement,
        shard_layout=layout,
    )
    plan = plan_pool(
        [packs.cu_seqlens(i) for i in range(config.pool_size)],
        cp_size=4,
        config=config,
        heads=HeadShape(q=8, kv=2, dim=2),
    )
    assert plan.traffic.any()
    check_attention(plan)


@settings(max_examples=40)
@given(any_pool)
def test_each_worker_computes_the_tiles_that_are_assigned_to_it(pool: SmallPool) -> None:
    plan = pool.plan()
    moved = exchange(plan)
    width = plan.heads.q // plan.shards
    for worker, rank_plan in enumerate(moved.rank_plans):
        for call in rank_plan.calls:
            q_buffer, _ = buffers(moved, worker, call)
            for q_rows, q_heads, _, _ in segments(call):
                at, head = np.divmod(q_buffer[q_rows, q_heads], plan.heads.q)
                block = np.searchsorted(plan.geometry.block_start, at, side="right") - 1
                assert (plan.assignment[block * plan.shards + head // width] == worker).all()


def test_where_nothing_moves_there_is_one_wide_call() -> None:
    config = PoolConfig(pool_size=1, block_size=4, head_shards=2, chunks=2, placement="paper")
    plan = plan_pool([[0, 5, 12]], cp_size=1, config=config, heads=HeadShape(q=8, kv=4, dim=2))
    rank_plan = make_rank_plan(plan, 0)
    (call,) = rank_plan.calls
    assert (call.chunk, call.q_buffer, call.kv_buffer) == (LOCAL, LOCAL, LOCAL)
    assert call.q_len.tolist() == [5, 7]  # blocks of one sample join
    assert (call.heads, call.kv_heads) == (8, 4)
    assert not any(
        message.moves for message in (*rank_plan.q, *rank_plan.kv, *rank_plan.kv_multicast)
    )


EVERY = small_pools(placements=("surplus", "paper", "ulysses"))


@given(EVERY)
@settings(max_examples=50)
def test_segments_cover_the_load_and_wait_only_for_chunks_that_exist(pool: SmallPool) -> None:
    plan = pool.plan()
    work = pool_segments(plan)
    load = np.zeros(plan.workers, dtype=np.int64)
    np.add.at(load, work.worker, work.pairs)
    assert (load == plan.load).all()
    assert ((work.chunk >= LOCAL) & (work.chunk < plan.head_groups.chunks)).all()
    at_once = work.chunk == LOCAL
    assert (work.q_buffer[at_once] == LOCAL).all()
    assert (work.kv_buffer[at_once] == LOCAL).all()
    assert (work.kv_buffer <= work.chunk).all()  # K and V of a later chunk are never waited for


@settings(max_examples=60)
@given(any_pool, st.integers(0, 2**32 - 1))
def test_segments_that_continue_each_other_are_one(pool: SmallPool, seed: int) -> None:
    plan = pool.plan()
    anywhere = np.random.default_rng(seed).integers(0, plan.workers, len(plan.assignment))
    for assignment in (plan.assignment, np.sort(anywhere).astype(np.int32)):
        moved = replace(plan, assignment=assignment)
        for worker in range(plan.workers):
            for call in worker_calls(moved, worker):
                columns = (call.q_start, call.k_start, call.q_head, call.kv_head)
                starts = np.stack(columns, axis=1).tolist()
                lengths = np.stack([call.q_len, call.k_len], axis=1).tolist()
                at = {tuple(start): length for start, length in zip(starts, lengths, strict=True)}
                for (q, *rest), (q_len, k_len) in zip(starts, lengths, strict=True):
                    after = at.get((q + q_len, *rest))
                    assert after is None or after[1] != k_len + after[0]


@given(any_pool)
def test_the_segments_of_a_pool_are_those_of_its_workers(pool: SmallPool) -> None:
    plan = pool.plan()
    together = pool_segments(plan)
    for worker in range(plan.workers):
        mine, alone = np.flatnonzero(together.worker == worker), pool_segments(plan, worker)
        for field in fields(together):
            column = getattr(together, field.name)[mine]
            assert sorted(column.tolist()) == sorted(getattr(alone, field.name).tolist())
