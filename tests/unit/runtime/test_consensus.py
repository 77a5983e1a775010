"""All ranks go on, or all raise the same error."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from libra.runtime.consensus import gather, reach_consensus, reach_consensus_at_store
from tests.distributed.threads import threaded_ranks


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def agree(
    rank: int,
    world_size: int,
    problems: Mapping[int, str],
    facts: Mapping[int, Mapping[str, object]],
) -> None:
    reach_consensus(group(), "attention", problems.get(rank), facts.get(rank, {"scale": 1.0}))


def agree_at_store(rank: int, world_size: int, odd: int | None) -> None:
    facts = {"configuration": "A", "mesh": 2 if rank == odd else 1}
    reach_consensus_at_store(range(world_size), facts)


def gathered(rank: int, world_size: int) -> list[list[int]]:
    rows: list[list[int]] = gather(group(), torch.tensor([rank, 10 * rank])).tolist()
    return rows


def test_equal_facts_let_all_ranks_go_on() -> None:
    assert threaded_ranks(3, agree, {}, {}) == [None] * 3


def test_a_problem_of_one_rank_is_raised_on_all() -> None:
    errors = threaded_ranks(3, agree, {1: "q is on a disk"}, {}, expect_error=True)
    assert errors == ["ValueError: worker 1: q is on a disk"] * 3


def test_ranks_with_the_same_problem_are_named_together() -> None:
    problems = dict.fromkeys(range(10), "no kernel")
    (error, *others) = threaded_ranks(11, agree, problems, {}, expect_error=True)
    assert error == "ValueError: workers 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: no kernel"
    assert set(others) == {error}


def test_different_facts_are_told_apart() -> None:
    facts = {2: {"scale": 2.0}}
    (error, *others) = threaded_ranks(3, agree, {}, facts, expect_error=True)
    assert error == (
        "ValueError: the ranks of one pool disagree: "
        "workers 0, 1 has scale 1.0; worker 2 has scale 2.0"
    )
    assert set(others) == {error}


def test_ranks_agree_at_the_store_before_they_have_groups() -> None:
    assert threaded_ranks(3, agree_at_store, None) == [None] * 3
    (error, *others) = threaded_ranks(3, agree_at_store, 1, expect_error=True)
    assert "rank 1 has mesh 2" in error and "configuration" not in error
    assert set(others) == {error}


def test_tensors_are_gathered_in_rank_order() -> None:
    assert threaded_ranks(3, gathered) == [[[0, 0], [1, 10], [2, 20]]] * 3
