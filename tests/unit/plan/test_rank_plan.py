"""What each worker sends, receives and computes, shown with rows that carry their identity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from libra.config import HeadShape, Placement, PoolConfig, ShardLayout
from libra.data.packing import pack_sequential
from libra.plan.attention_calls import LOCAL, AttentionCall
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.rank_plan import make_rank_plan
from tests.exchange_model import NOTHING, Exchange, exchange
from tests.pools import SmallPool, small_pools
from tests.slow_planner import sample_tables

pytestmark = pytest.mark.usefixtures("eager_multicasts")

IntArray = NDArray[np.int64]

DATA = Path(__file__).parents[2] / "data"

any_pool = small_pools(placements=("paper", "surplus", "ulysses"))


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


def segments(launch: AttentionCall) -> list[tuple[slice, slice, slice, slice]]:
    """Rows and heads of q, rows and heads of k, of each segment."""
    work = launch
    columns = (work.q_start, work.q_len, work.k_start, work.k_len, work.q_head, work.kv_head)
    return [
        (
            slice(q, q + q_len),
            slice(head, head + work.heads),
            slice(k, k + k_len),
            slice(kv_head, kv_head + work.kv_heads),
        )
        for q, q_len, k, k_len, head, kv_head in np.stack(columns, axis=1).tolist()
    ]


def buffers(moved: Exchange, worker: int, launch: AttentionCall) -> tuple[IntArray, IntArray]:
    """The q and k buffers that a launch reads."""
    q = moved.q_local if launch.q_buffer == LOCAL else None
    k = moved.k_local if launch.kv_buffer == LOCAL else None
    return (
        moved.q_fetched[worker][launch.q_buffer] if q is None else q[worker],
        moved.k_fetched[worker][launch.kv_buffer] if k is None else k[worker],
    )


def check_segment(plan: PoolPlan, q: IntArray, k: IntArray, where: IntArray) -> None:
    """One segment's queries [rows, heads] must meet exactly their causal keys [rows, kv heads]."""
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
    """All launches of all workers together are the pool's attention, each query and head once."""
    moved, where = exchange(plan), np.stack(sample_of_position(plan))
    computed = np.zeros((len(where[0]), plan.heads.q), dtype=np.int64)
    pairs = np.zeros(plan.workers, dtype=np.int64)
    for worker, rank_plan in enumerate(moved.rank_plans):
        answered = [np.zeros(rows.shape, dtype=np.int64) for rows in moved.q_fetched[worker]]
        for launch in rank_plan.calls:
            q_buffer, k_buffer = buffers(moved, worker, launch)
            assert len(launch) > 0
            for q_rows, q_heads, k_rows, k_heads in segments(launch):
                q, k = q_buffer[q_rows, q_heads], k_buffer[k_rows, k_heads]
                assert q.shape == (q_rows.stop - q_rows.start, launch.heads)
                assert k.shape == (k_rows.stop - k_rows.start, launch.kv_heads)
                check_segment(plan, q, k, where)
                assert launch.kv_buffer <= launch.chunk
                np.add.at(computed.ravel(), q.ravel(), 1)
                pairs[worker] += (where[1][q // plan.heads.q] + 1).sum()
                if launch.q_buffer != LOCAL:
                    answered[launch.q_buffer][q_rows, q_heads] += 1
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
def test_so_it_is_where_shards_and_chunks_tear_query_groups(
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
        for launch in rank_plan.calls:
            q_buffer, _ = buffers(moved, worker, launch)
            for q_rows, q_heads, _, _ in segments(launch):
                at, head = np.divmod(q_buffer[q_rows, q_heads], plan.heads.q)
                block = np.searchsorted(plan.geometry.block_start, at, side="right") - 1
                assert (plan.assignment[block * plan.shards + head // width] == worker).all()


@settings(max_examples=40)
@given(any_pool)
def test_every_needed_key_row_arrives_once_and_nothing_else_does(pool: SmallPool) -> None:
    plan = pool.plan()
    moved, where = exchange(plan), np.stack(sample_of_position(plan))
    whole = plan.config.placement == "paper"  # complete groups, not prefixes
    for worker, rank_plan in enumerate(moved.rank_plans):
        needed: set[int] = set()
        for launch in rank_plan.calls:
            _, k_buffer = buffers(moved, worker, launch)
            for _, _, k_rows, k_heads in segments(launch):
                k = k_buffer[k_rows, k_heads]
                if whole:
                    sample = where[0][k[0, 0] // plan.heads.kv]
                    at = np.flatnonzero(where[0] == sample)
                    k = at[:, None] * plan.heads.kv + k[0] % plan.heads.kv
                needed.update(k.ravel().tolist())
        needed -= set(moved.k_local[worker].ravel().tolist())
        arrived = [rows.ravel() for rows in moved.k_arrived[worker]]
        assert sorted(np.concatenate(arrived).tolist()) == sorted(needed)


@settings(max_examples=40)
@given(any_pool)
def test_the_bytes_of_a_plan_are_those_of_the_rows_that_travel(pool: SmallPool) -> None:
    plan = pool.plan()
    moved, heads = exchange(plan), plan.heads
    q, kv, o = plan.traffic
    assert np.array_equal(q, moved.q_traffic * heads.dim * heads.bytes)
    assert np.array_equal(kv, moved.k_traffic * (heads.dim + heads.value_dim) * heads.bytes)
    assert np.array_equal(o, moved.q_traffic.T * heads.value_dim * heads.bytes)
    assert (plan.bytes_q, plan.bytes_kv, plan.bytes_o) == (q.sum(), kv.sum(), o.sum())


@settings(max_examples=40)
@given(any_pool)
def test_chunks_are_alike_and_no_launch_runs_before_its_buffers_or_after_their_return(
    pool: SmallPool,
) -> None:
    plan = pool.plan()
    rank_plans = [make_rank_plan(plan, worker) for worker in range(plan.workers)]
    assert len({rank_plan.kv_done for rank_plan in rank_plans}) == 1, (
        "gradients return in one order"
    )
    for rank_plan in rank_plans:
        assert [launch.chunk for launch in rank_plan.calls] == sorted(
            launch.chunk for launch in rank_plan.calls
        )
        for launch in rank_plan.calls:
            assert launch.q_buffer in (LOCAL, launch.chunk)
            assert launch.kv_buffer <= launch.chunk
            if launch.kv_buffer != LOCAL:
                assert launch.chunk <= rank_plan.kv_done[launch.kv_buffer] < plan.config.chunks
        assert len({(len(message.send_index), message.received) for message in rank_plan.q}) == 1
        assert rank_plan.lse_size == sum(launch.lse_size for launch in rank_plan.calls)


@settings(max_examples=25)
@given(any_pool)
def test_a_plan_that_came_over_the_wire_gives_the_same_route(pool: SmallPool) -> None:
    plan = pool.plan()
    copy = PoolPlan.from_buffer(plan.to_buffer(), plan.config, plan.heads)
    for worker in range(plan.workers):
        assert flat(make_rank_plan(copy, worker)) == flat(make_rank_plan(plan, worker))


def flat(value: object) -> object:
    """A rank_plan as nested lists, so that two can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [flat(item) for item in value]
    if hasattr(value, "__slots__"):
        return [flat(getattr(value, name)) for name in value.__slots__]
    return value


@settings(max_examples=25)
@given(any_pool)
def test_padding_rows_are_those_that_belong_to_no_sample(pool: SmallPool) -> None:
    plan = pool.plan()
    moved, (sample, _) = exchange(plan), sample_of_position(plan)
    for rank_plan, positions in zip(moved.rank_plans, moved.positions, strict=True):
        assert rank_plan.rows == len(positions)
        assert rank_plan.padding.tolist() == np.flatnonzero(sample[positions] == NOTHING).tolist()


def test_where_nothing_moves_there_is_one_wide_launch() -> None:
    config = PoolConfig(pool_size=1, block_size=4, head_shards=2, chunks=2, placement="paper")
    plan = plan_pool([[0, 5, 12]], cp_size=1, config=config, heads=HeadShape(q=8, kv=4, dim=2))
    rank_plan = make_rank_plan(plan, 0)
    (launch,) = rank_plan.calls
    assert (launch.chunk, launch.q_buffer, launch.kv_buffer) == (LOCAL, LOCAL, LOCAL)
    assert launch.q_len.tolist() == [5, 7]  # blocks of one sample join
    assert (launch.heads, launch.kv_heads) == (8, 4)
    assert not any(
        message.moves for message in (*rank_plan.q, *rank_plan.kv, *rank_plan.kv_multicast)
    )


def test_a_worker_without_work_has_no_launch_but_every_message() -> None:
    config = PoolConfig(pool_size=2, block_size=4, chunks=2, placement="paper")
    heads = HeadShape(q=2, kv=2, dim=2)
    plan = plan_pool([[0, 1], [0, 1]], cp_size=2, config=config, heads=heads, tokens=1)
    assert plan.load.tolist() == [2, 0, 2, 0]
    for worker in (1, 3):
        rank_plan = make_rank_plan(plan, worker)
        assert (rank_plan.calls, rank_plan.rows) == ((), 0)
        assert [
            len(x)
            for x in (rank_plan.q, rank_plan.kv, rank_plan.kv_multicast, rank_plan.kv_buffers)
        ] == [2] * 4
