"""A lost rank ends the job within the groups' timeout, and every survivor names it."""

from __future__ import annotations

import re

import pytest

from tests.distributed.lost_rank import GROUP_TIMEOUT, Stage, lose


@pytest.mark.parametrize(
    "world_size, lost, stage, rank_0_hosts_store, told",
    [
        (3, 1, "forward", False, "the forward exchange"),
        (3, 2, "backward", True, "the backward exchange"),
        # Four, so that a ring has ranks which never talk to the lost one.
        (4, 2, "between microbatches", False, "microbatch"),
        (4, 2, "planning", False, "planning"),
        (4, 0, "between microbatches", True, "microbatch"),
    ],
)
def test_every_survivor_names_the_lost_rank(
    world_size: int, lost: int, stage: Stage, rank_0_hosts_store: bool, told: str
) -> None:
    endings = lose(world_size, lost, stage, rank_0_hosts_store=rank_0_hosts_store)
    survivors = [ending for rank, ending in enumerate(endings) if rank != lost]
    ranks = re.escape(str(list(range(world_size))))
    pattern = rf"RuntimeError: {told} failed in the pool of ranks {ranks}: rank {lost} no longer .*"
    for survivor in survivors:
        assert re.fullmatch(pattern, survivor.error, re.DOTALL), endings
        assert survivor.seconds < GROUP_TIMEOUT.total_seconds() / 2
        assert survivor.exit_code == 1


def test_a_rank_that_fails_elsewhere_ends_although_its_planner_waits_for_the_others() -> None:
    survivor, failing = lose(2, 1, "user error", rank_0_hosts_store=False)
    assert failing.error == "KeyError: 'a mistake elsewhere'"
    assert failing.exit_code == 1
    assert "rank 1 no longer answers" in survivor.error
    assert survivor.seconds < GROUP_TIMEOUT.total_seconds() / 2
