"""Planning ahead from global metadata and planning from gathered bounds lead to the same plan."""

from __future__ import annotations

import pytest

import libra
from tests.distributed.cases import make_mesh, make_pool
from tests.distributed.ranks import RankPool
from tests.distributed.refusals import tensors

PACKS = [[[0, 16], [0, 5, 16]], [[0, 4, 9], [0, 16]], [[0, 8, 16], [0, 3, 16]]]
"""Bounds of three microbatches of two packs; one ends in padding."""
HEADS = libra.HeadShape(4, 2, 8, 8)
CONFIG = libra.PoolConfig(pool_size=2, block_size=4, chunks=2)


def digests(
    rank: int, world_size: int, ahead: list[int], known: bool
) -> tuple[list[bool], list[int]]:
    """After prefetching the microbatches `ahead`, all three in turn: whether the microbatch was one
    made ahead, and its plan's digest.
    """
    pool = make_pool(world_size, 1, CONFIG)
    if known:
        pool._runtime.plan_for(HEADS)
    for microbatch in ahead:
        pool.prefetch(PACKS[microbatch], tokens=16)
    made_ahead = {id(microbatch) for microbatch in pool._runtime.prefetched}
    used, plans = [], []
    for packs in PACKS:
        with pool.microbatch(packs[rank], tokens=16) as microbatch:
            libra.libra_attention(*tensors()).sum().backward()
        used.append(id(microbatch) in made_ahead)
        plans.append(microbatch.plan(HEADS).digest())
    pool.close()
    return used, plans


@pytest.mark.parametrize("known", [False, True])
def test_a_prefetched_plan_is_the_gathered_one(ranks2: RankPool, known: bool) -> None:
    """Whether the head shape is known beforehand or told by the first call."""
    ((_, gathered), other) = ranks2.run(digests, [], known)
    assert other == ([False] * 3, gathered)
    for used, plans in ranks2.run(digests, [0, 1, 2], known):
        assert used == [True] * 3
        assert plans == gathered


def test_a_microbatch_that_is_left_out_does_not_matter(ranks2: RankPool) -> None:
    ((_, gathered), _) = ranks2.run(digests, [], True)
    for used, plans in ranks2.run(digests, [2, 1], True):
        assert used == [False, True, False]
        assert plans == gathered
    for used, plans in ranks2.run(digests, [0, 2], True):
        assert used == [True, False, True]
        assert plans == gathered


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "first, second",
    [([0, 1, 2], [1, 0, 2]), ([0, 1, 2], []), ([0], [0, 1, 2]), ([0, 1], [0, 2])],
)
def test_ranks_that_prefetch_out_of_step_fall_back_to_gathering(
    ranks2: RankPool, first: list[int], second: list[int], known: bool
) -> None:
    ((_, gathered), _) = ranks2.run(digests, [], known)
    outcomes = ranks2.run_each(digests, [(first, known), (second, known)], timeout=20)
    assert [plans for _, plans in outcomes] == [gathered, gathered]


def planned_ahead(rank: int, world_size: int) -> list[bool]:
    """Whether prefetched microbatches are planned once the first call has told the head shape."""
    pool = make_pool(world_size, 1, CONFIG)
    for packs in PACKS:
        pool.prefetch(packs, tokens=16)
    with pool.microbatch(PACKS[0][rank], tokens=16):
        libra.libra_attention(*tensors()).sum().backward()
    planned = [HEADS in microbatch._planned for microbatch in pool._runtime.prefetched]
    pool.close()
    return planned


def test_the_first_call_starts_the_plans_of_all_that_was_prefetched(ranks2: RankPool) -> None:
    assert ranks2.run(planned_ahead) == [[True, True]] * 2


def far_ahead(rank: int, world_size: int) -> int:
    """Backwards after their microbatches; more are planned ahead than may be under way."""
    mesh, groups = make_mesh(world_size, 1), make_pool(world_size, 1, CONFIG).groups
    pool = libra.SequencePool(mesh, CONFIG, heads=HEADS, groups=groups, live_microbatches=2)
    for packs in PACKS * 2:
        pool.prefetch(packs, tokens=16)
    under_way = []
    for packs in PACKS * 2:
        with pool.microbatch(packs[rank], tokens=16):
            under_way.append(libra.libra_attention(*tensors()).sum())
        if len(under_way) == 2:
            under_way.pop(0).backward()
    under_way.pop().backward()
    pool.close()
    return len(pool._runtime.prefetched)


def test_any_number_may_be_planned_ahead_of_those_under_way(ranks2: RankPool) -> None:
    assert ranks2.run(far_ahead) == [0, 0]
