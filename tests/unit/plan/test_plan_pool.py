"""Planning a pool: the same arguments give the same plan, and what cannot be planned is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from libra.config import HeadShape, PoolConfig
from libra.plan.plan_pool import plan_pool
from tests.pools import SmallPool, real_pool, small_pools

HEADS = HeadShape(q=8, kv=2, dim=4, v_dim=6)


PAPER = PoolConfig(pool_size=2, block_size=4, head_shards=2, chunks=2, placement="paper")


PACKS = [[0, 3, 4, 16], [0, 1, 16]]


@settings(max_examples=40)
@given(small_pools(placements=("paper", "surplus", "ulysses")))
def test_the_same_arguments_give_the_same_plan_in_any_spelling(pool: SmallPool) -> None:
    plan = pool.plan()
    again = plan_pool(
        [np.array([b for b in cu if b <= pool.tokens], dtype=np.int32) for cu in pool.packs],
        cp_size=pool.cp_size,
        config=pool.config.replace(),
        heads=pool.heads,
        tokens=pool.tokens,
    )
    assert again.to_buffer().tobytes() == plan.to_buffer().tobytes()
    assert again.digest() == plan.digest()


def test_a_pool_of_padding_only_is_balanced_and_moves_nothing() -> None:
    for placement in ("paper", "surplus"):
        config = PAPER.replace(placement=placement)
        plan = plan_pool([[0], [0]], cp_size=2, config=config, heads=HEADS, tokens=8)
        assert plan.load.tolist() == [0, 0, 0, 0]
        assert plan.imbalance == 0.0
        assert plan.traffic.sum() == 0


@settings(max_examples=40)
@given(small_pools(placements=("surplus",)))
def test_moving_only_the_surplus_never_balances_worse_than_target_and_paper(
    pool: SmallPool,
) -> None:
    free = pool.config.replace(traffic_limit=math.inf, memory_limit=math.inf)
    plan = replace(pool, config=free).plan()
    paper = replace(pool, config=pool.config.replace(placement="paper")).plan()
    assert plan.load.sum() == paper.load.sum()
    assert plan.imbalance <= max(pool.config.tolerance, paper.imbalance) + 1e-12


@pytest.mark.parametrize(
    "changes, arguments, message",
    [
        ({"pool_size": 3}, {}, "2 packs for a pool of pool_size=3"),
        ({"head_shards": 3}, {}, r"8 query heads .*3 head shards; .*head_shards \(H\)"),
        ({"chunks": 3}, {}, r"4 query heads \(8 / H=2\).*3 chunks; .*chunks \(M\)"),
        ({}, {"cp_size": 0}, "cp_size is 0; it must be an integer >= 1"),
        ({}, {"cp_size": 2.0}, "cp_size is 2.0"),
        ({}, {"tokens": 0}, "tokens is 0"),
        ({}, {"tokens": 15}, "cu_seqlens ends at 16 but the pack has 15 tokens"),
        ({}, {"tokens": "16"}, "tokens is '16'"),
        ({}, {"packs": [[0, 16], [0, 15]]}, r"different tokens: \[15, 16\].*tokens=L"),
        ({}, {"packs": [[0, 16], [0, 9, 4, 16]]}, "falls from 9 to 4"),
        ({}, {"packs": [[0, 16], [-1, 16]]}, "starts at -1"),
        ({}, {"packs": [[0, 16], [0, 2.5, 16]]}, r"cu_seqlens\[1\] is 2.5"),
        ({}, {"packs": [[0, 16], []]}, "cu_seqlens is empty"),
        ({}, {"packs": [[0], [0]]}, "pack of 0 tokens"),
        ({}, {"packs": []}, "0 packs for a pool of pool_size=2"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_value_and_the_setting(
    changes: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"packs": PACKS, "cp_size": 2} | arguments
    packs = given.pop("packs")
    with pytest.raises(ValueError, match=message):
        plan_pool(packs, config=PAPER.replace(**changes), heads=HEADS, **given)


LENGTHS = Path(__file__).parents[2] / "data" / "lengths-code.npy"


TOKENS = 262_144


CP = 8


@pytest.mark.parametrize(
    "speeds, message",
    [
        (np.ones(63), "give one number a worker, shape \\(64,\\)"),
        (np.append(np.ones(63), 0), "speeds\\[63\\] is 0.0; it must be finite and > 0"),
        (np.append(np.ones(63), math.nan), "speeds\\[63\\] is nan"),
        (["fast"] * 64, "speeds must be numbers"),
    ],
)
def test_speeds_that_are_none_are_refused(speeds: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_pool(real_pool(), cp_size=CP, config=PoolConfig(), heads=HEADS, speeds=speeds)


def test_the_papers_placement_knows_no_speeds() -> None:
    with pytest.raises(ValueError, match="speeds need placement='surplus'"):
        plan_pool(
            real_pool(),
            cp_size=CP,
            config=PoolConfig(placement="paper"),
            heads=HEADS,
            speeds=np.ones(64),
        )
