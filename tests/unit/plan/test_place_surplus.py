"""The surplus placement: balance, and limits that hold whatever the lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from libra.config import HeadShape, PoolConfig
from libra.plan import place_surplus as surplus
from libra.plan import place_surplus_kernels as surplus_kernels
from libra.plan.place_surplus_kernels import ByteBudget
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.traffic import pool_traffic
from tests.pools import SmallPool, expected_plans, real_pool, small_pools

HEADS = HeadShape(q=128, kv=16, dim=256)

CP = 8

EXACT = 1e-9

ONE_TOKEN = SmallPool(
    packs=[[0, 1]],
    tokens=1,
    cp_size=3,
    config=PoolConfig(pool_size=1, head_shards=4, chunks=1, tolerance=0.0, ranks_per_node=1),
    heads=HeadShape(q=12, kv=3, dim=1),
)
"""Four head shards over three key/value heads: two of the shards read two of these heads."""


def sent_received_held(plan: PoolPlan) -> tuple[float, float, float]:
    """Of the worker with the most, in multiples of a worker's own q, k, v and out."""
    own = int(plan.geometry.rows.max()) * plan.heads.token_bytes
    moved = plan.traffic.sum(axis=0)
    held = pool_traffic(plan).extra_memory
    return moved.sum(axis=1).max() / own, moved.sum(axis=0).max() / own, held.max() / own


def most_held(home: PoolPlan) -> np.ndarray:
    """Bytes each worker holds for rows of its own where their keys do not lie side by side."""
    fetches, heads = home.kv_fetches, home.heads
    row = heads.kv_bytes(home.head_groups.kv_heads)
    rows = np.zeros(home.workers, dtype=np.int64)
    np.add.at(rows, fetches.worker, np.where(fetches.resident, 0, fetches.length))
    return rows * row


def at_home(pool: SmallPool) -> PoolPlan:
    """The pool with limits that let only K and V inside CP groups move, without multicasts."""
    config = pool.config.replace(traffic_limit=0.0, memory_limit=0.0, ranks_per_node=2**30)
    return SmallPool(
        packs=pool.packs,
        tokens=pool.tokens,
        cp_size=pool.cp_size,
        config=config,
        heads=pool.heads,
    ).plan()


@pytest.mark.usefixtures("short_multicasts")
@given(
    pool=small_pools(placements=("surplus",)),
    traffic=st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0, 2.0]),
    memory=st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0, 2.0]),
)
@example(pool=ONE_TOKEN, traffic=2.0, memory=0.3)
def test_no_worker_passes_a_limit_by_more_than_its_own_rows_need(
    pool: SmallPool, traffic: float, memory: float
) -> None:
    home = at_home(pool)
    sent, received, _ = sent_received_held(home)
    own = int(home.geometry.rows.max()) * home.heads.token_bytes
    held = most_held(home).max() / own
    config = pool.config.replace(traffic_limit=traffic, memory_limit=memory)
    plan = plan_pool(
        pool.packs, cp_size=pool.cp_size, config=config, heads=pool.heads, tokens=pool.tokens
    )
    now = sent_received_held(plan)
    assert now[0] <= traffic + sent + EXACT
    assert now[1] <= traffic + received + EXACT
    assert now[2] <= memory + held + EXACT


@pytest.mark.usefixtures("short_multicasts")
@given(
    pool=small_pools(placements=("surplus",)),
    ranks_per_node=st.integers(1, 12),
    node_local_first=st.booleans(),
)
@example(pool=ONE_TOKEN, ranks_per_node=1, node_local_first=True)
@example(pool=ONE_TOKEN, ranks_per_node=1, node_local_first=False)
def test_the_placement_counts_no_byte_too_few(
    pool: SmallPool, ranks_per_node: int, node_local_first: bool
) -> None:
    """The bytes counted while placing are at least those that the plan then moves and holds.

    A multicast sends from others what is counted for the holders, but from none more than from the
    busiest holder.
    """
    config = pool.config.replace(ranks_per_node=ranks_per_node)
    with mock.patch("libra.plan.plan_pool.keeps_limits", return_value=False):
        home = at_home(pool)  # never whole tiles instead
    uncut = replace(home, config=config, shards=config.head_shards)
    with mock.patch.object(
        surplus, "move_surplus", side_effect=surplus_kernels.move_surplus
    ) as placing:
        plan = surplus.place_surplus(uncut, node_local_first=node_local_first)
    budget: ByteBudget = placing.call_args.args[4]
    moved = plan.traffic.sum(axis=0)
    needed = home.traffic.sum(axis=0)
    sent, received, held = budget.moved
    sent = sent + needed.sum(axis=1)
    received = received + needed.sum(axis=0)
    held = held + most_held(home)
    assert (moved.sum(axis=1) <= (sent.max() if plan.kv_transfers.passed_on.any() else sent)).all()
    assert (moved.sum(axis=0) <= received).all()
    assert (pool_traffic(plan).extra_memory <= held).all()


@given(pool=small_pools(placements=("surplus",)))
def test_with_limits_of_nothing_every_worker_computes_its_own_rows(pool: SmallPool) -> None:
    plan = at_home(pool)
    assert np.array_equal(plan.load, plan.home_load)


@given(pool=small_pools(placements=("surplus",)))
def test_a_limit_that_the_free_plan_keeps_hardly_changes_the_balance(pool: SmallPool) -> None:
    free = pool.config.replace(traffic_limit=math.inf, memory_limit=math.inf)
    plan = plan_pool(
        pool.packs, cp_size=pool.cp_size, config=free, heads=pool.heads, tokens=pool.tokens
    )
    assume(plan.imbalance <= free.tolerance)
    generous = free.replace(traffic_limit=99.0, memory_limit=99.0)
    again = plan_pool(
        pool.packs, cp_size=pool.cp_size, config=generous, heads=pool.heads, tokens=pool.tokens
    )
    assert np.array_equal(again.assignment, plan.assignment)


@pytest.mark.parametrize("limit", [0.5, 0.4])
def test_real_lengths_keep_a_tight_limit_and_lose_balance(limit: float) -> None:
    def planned(traffic_limit: float) -> PoolPlan:
        config = PoolConfig(traffic_limit=traffic_limit)
        return plan_pool(real_pool(), cp_size=CP, config=config, heads=HEADS)

    least = sent_received_held(planned(0.0))
    sent, received, _ = sent_received_held(planned(limit))
    assert sent <= limit + least[0] and received <= limit + least[1]
    assert planned(limit).imbalance > 0.03
    assert planned(1.0).imbalance <= 0.03


def test_there_is_no_limit_unless_one_is_asked_for() -> None:
    assert PoolConfig().traffic_limit == PoolConfig().memory_limit == math.inf


@pytest.mark.parametrize("kv", [1, 4, 16, 128])
def test_real_lengths_balance_whatever_the_heads_and_nobody_moves_much_more_than_it_holds(
    kv: int,
) -> None:
    heads = HeadShape(q=128, kv=kv, dim=128)
    plan = plan_pool(real_pool(), cp_size=CP, config=PoolConfig(chunks=1), heads=heads)
    assert plan.imbalance <= 0.03
    sent, received, held = sent_received_held(plan)
    assert max(sent, received) <= 1.5 and held <= 3


def test_neighbours_on_a_node_take_each_others_surplus() -> None:
    """Two nodes of two packs, one heavy and one light each: nothing has to cross."""
    heavy, heavier, light = [0, 4000, 4096], [0, 4096], list(range(0, 4097, 64))

    def far(ranks_per_node: int) -> int:
        config = PoolConfig(pool_size=4, ranks_per_node=ranks_per_node)
        heads = HeadShape(q=8, kv=8, dim=16)
        plan = plan_pool([heavy, light, light, heavier], cp_size=2, config=config, heads=heads)
        assert plan.imbalance <= 0.03
        node = np.arange(plan.workers) // 4
        return int(plan.traffic[:, node[:, None] != node].sum())

    assert far(4) == 0 < far(8)


def test_faster_workers_get_more_work() -> None:
    speeds = np.ones(64)
    speeds[::4] = 0.5
    plan = plan_pool(real_pool(), cp_size=CP, config=PoolConfig(), heads=HEADS, speeds=speeds)
    equal = plan_pool(real_pool(), cp_size=CP, config=PoolConfig(), heads=HEADS)
    assert plan.imbalance <= 0.031 < (equal.load / speeds).max() / plan.load.mean() - 1
    assert plan.load[::4].max() <= 0.61 * plan.load.max()
    seconds = plan.load / speeds
    assert seconds.max() <= 1.031 * plan.load.sum() / speeds.sum()


def test_speeds_count_by_their_ratios_and_equal_ones_change_nothing() -> None:
    def assignment(speeds: object) -> list[int]:
        plan = plan_pool(real_pool(), cp_size=CP, config=PoolConfig(), heads=HEADS, speeds=speeds)
        return plan.assignment.tolist()

    uneven = np.linspace(0.8, 1.2, 64)
    assert assignment(uneven) == assignment(7 * uneven)
    assert assignment(np.full(64, 3)) == assignment(None)


@settings(max_examples=60)
@given(
    packs=st.lists(st.lists(st.integers(1, 64), max_size=6), min_size=2, max_size=5),
    cp_size=st.sampled_from([1, 2]),
    ranks_per_node=st.integers(1, 4),
    memory=st.sampled_from([0.3, 0.5, 0.8]),
)
def test_the_memory_limit_holds_where_rows_are_passed_on_whatever_the_nodes(
    packs: list[list[int]], cp_size: int, ranks_per_node: int, memory: float
) -> None:
    """Long samples next to short ones, few key/value heads, nodes that do not divide the pool."""
    tokens = 4096
    bounds = [sorted({0, tokens, *(64 * cut for cut in cuts)}) for cuts in packs]
    heads = HeadShape(q=8, kv=2, dim=16)
    config = PoolConfig(
        pool_size=len(packs), chunks=1, ranks_per_node=ranks_per_node, memory_limit=memory
    )

    def planned(memory_limit: float) -> PoolPlan:
        limited = config.replace(memory_limit=memory_limit)
        return plan_pool(bounds, cp_size=cp_size, config=limited, heads=heads)

    plan, home = planned(memory), planned(0.0)
    own = int(plan.geometry.rows.max()) * heads.token_bytes
    assert pool_traffic(plan).extra_memory.max() <= memory * own + most_held(home).max()


def test_moving_only_the_surplus_of_real_lengths_balances_and_moves_less() -> None:
    for row in expected_plans()[::3]:
        n = {name: int(row[name]) for name in list(row)[:8]}
        packs = real_pool(n["tokens"], n["global_batch"], n["pool_size"])
        config = PoolConfig(block_size=n["block_size"], head_shards=n["head_shards"])
        heads = HeadShape(q=128, kv=n["kv_heads"], dim=256, bytes=2)
        plan = plan_pool(packs, cp_size=n["cp_size"], config=config, heads=heads)
        assert plan.imbalance < 0.031
        moved = plan.traffic.sum() / 1e9
        assert moved < 0.75 * (float(row["qo_gb"]) + float(row["kv_gb"]))
