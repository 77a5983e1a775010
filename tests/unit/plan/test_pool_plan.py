"""A plan and its wire form: what a plan says of itself, and which buffers are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.plan_pool import PoolPlan, plan_pool
from tests.exchange_model import exchange
from tests.pools import SmallPool, real_pool, small_pools

pytestmark = pytest.mark.usefixtures("eager_multicasts")

HEADS = HeadShape(q=8, kv=2, dim=4, v_dim=6)


PAPER = PoolConfig(pool_size=2, block_size=4, head_shards=2, chunks=2, placement="paper")


PACKS = [[0, 3, 4, 16], [0, 1, 16]]


@settings(max_examples=40)
@given(small_pools(placements=("paper", "surplus", "ulysses")))
def test_a_plan_survives_the_wire(pool: SmallPool) -> None:
    plan = pool.plan()
    buffer = plan.to_buffer()
    copy = PoolPlan.from_buffer(buffer, plan.config, plan.heads)
    assert buffer.dtype == np.uint8
    assert copy.to_buffer().tobytes() == buffer.tobytes()
    assert copy.digest() == plan.digest()
    assert (copy.tokens, copy.cp_size, copy.shards) == (plan.tokens, plan.cp_size, plan.shards)
    assert copy.assignment.dtype == np.int32
    assert np.array_equal(copy.assignment, plan.assignment)
    assert [cu.tolist() for cu in copy.cu_seqlens] == [cu.tolist() for cu in plan.cu_seqlens]
    for name in ("block_start", "block_stop", "block_worker", "block_local", "block_pairs"):
        assert np.array_equal(getattr(copy.geometry, name), getattr(plan.geometry, name))
    assert np.array_equal(copy.traffic, plan.traffic)


def small_plan(**changes: Any) -> PoolPlan:
    return plan_pool(PACKS, cp_size=2, config=PAPER.replace(**changes), heads=HEADS)


def test_plans_that_differ_anywhere_have_another_digest() -> None:
    other_lengths = plan_pool([[0, 2, 4, 16], [0, 1, 16]], cp_size=2, config=PAPER, heads=HEADS)
    plans = [small_plan(), small_plan(tolerance=0.5), small_plan(backward="refetch"), other_lengths]
    assert len({plan.digest() for plan in plans}) == 4
    assert all(0 <= plan.digest() < 2**63 for plan in plans)


def change(at: int) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    def changed(buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        copy = buffer.copy()
        copy[at] ^= 1
        return copy

    return changed


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda buffer: buffer[:0], "of 0 bytes is truncated"),
        (lambda buffer: buffer[:31], "of 31 bytes is truncated"),
        (lambda buffer: np.zeros(400, dtype=np.uint8), "not a Libra plan"),
        (change(0), "not a Libra plan"),
        (change(8), "plan buffer version 2; this build reads version 3"),
        (lambda buffer: buffer[:-1], "truncated or damaged"),
        (lambda buffer: buffer[:-16], "truncated or damaged"),
        (lambda buffer: np.append(buffer, buffer), "truncated or damaged"),
        (change(16), "truncated or damaged"),
        (change(100), "truncated or damaged"),
        (change(-1), "truncated or damaged"),
    ],
)
def test_a_buffer_that_is_no_whole_plan_is_refused(
    damage: Callable[[NDArray[np.uint8]], NDArray[np.uint8]], message: str
) -> None:
    buffer = damage(small_plan().to_buffer())
    with pytest.raises(ValueError, match=message):
        PoolPlan.from_buffer(buffer, PAPER, HEADS)


@pytest.mark.parametrize(
    "config, heads",
    [
        (PAPER.replace(chunks=1), HEADS),
        (PAPER.replace(tolerance=0.04), HEADS),
        (PAPER.replace(backward="refetch"), HEADS),
        (PAPER, HeadShape(q=8, kv=2, dim=4, v_dim=6, bytes=4)),
        (PAPER, HeadShape(q=8, kv=2, dim=4)),
    ],
)
def test_a_plan_for_other_settings_is_refused(config: PoolConfig, heads: HeadShape) -> None:
    with pytest.raises(ValueError, match="made for another configuration or head shape"):
        PoolPlan.from_buffer(small_plan().to_buffer(), config, heads)


def test_home_load_is_what_each_worker_has_if_nothing_moves() -> None:
    plan = plan_pool([[0, 4]], cp_size=2, config=PAPER.replace(pool_size=1), heads=HEADS)
    assert plan.home_load.tolist() == [8 * (1 + 2), 8 * (3 + 4)]
    assert plan.home_load.sum() == plan.load.sum()


LENGTHS = Path(__file__).parents[2] / "data" / "lengths-code.npy"


TOKENS = 262_144


CP = 8


def test_a_plan_carries_its_speeds_to_the_other_ranks() -> None:
    speeds = np.linspace(0.8, 1.2, 64)
    plan = plan_pool(real_pool(), cp_size=CP, config=PoolConfig(), heads=HEADS, speeds=speeds)
    copy = PoolPlan.from_buffer(plan.to_buffer(), plan.config, plan.heads)
    assert copy.imbalance == plan.imbalance
    assert copy.digest() == plan.digest()


any_pool = small_pools(placements=("paper", "surplus", "ulysses"))


@settings(max_examples=40)
@given(any_pool)
def test_the_bytes_of_a_plan_are_those_of_the_rows_that_travel(pool: SmallPool) -> None:
    plan = pool.plan()
    moved, heads = exchange(plan), plan.heads
    q, kv, o = plan.traffic
    assert np.array_equal(q, moved.q_traffic * heads.dim * heads.bytes)
    assert np.array_equal(kv, moved.k_traffic * (heads.dim + heads.value_dim) * heads.bytes)
    assert np.array_equal(o, moved.q_traffic.T * heads.value_dim * heads.bytes)
