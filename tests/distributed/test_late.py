"""Nothing is read before it has arrived, and nothing is overwritten while it is under way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.plan.pool_plan import PoolPlan
from tests.distributed.cases import Case
from tests.distributed.late_transport import late
from tests.distributed.test_kv_multicast import APART, pools_apart, posted
from tests.distributed.test_many_ranks import check_numbers, pools
from tests.distributed.threads import threaded_ranks


def check_late(case: Case) -> PoolPlan:
    """The numbers of a case whose messages are late, and all of them taken."""
    with late(len(case.bounds) * case.cp) as world:
        plan = check_numbers(case)
        assert not any(world.under_way(rank) for rank in range(world.size))
        return plan


@settings(max_examples=12)
@given(case=pools(8))
def test_any_pool(case: Case) -> None:
    check_late(case)


@pytest.mark.usefixtures("eager_multicasts")
@settings(max_examples=12)
@given(case=pools_apart(8), at_once=st.booleans())
def test_any_pool_with_multicasts(case: Case, at_once: bool) -> None:
    with posted(at_once):
        check_late(case)


@pytest.mark.parametrize("backward", ["retain", "refetch"])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("heads", [(4, 4, 4, 4), (8, 2, 8, 4), (4, 1, 8, 8)])
def test_a_long_sample_among_short_ones(
    heads: tuple[int, int, int, int], at_once: bool, backward: str
) -> None:
    """Returns of those who compute nothing for others are posted before their queries are taken."""
    tokens = 256
    short = list(range(0, tokens + 1, 16))
    config = APART.replace(pool_size=8, chunks=4 if heads[1] > 1 else 2, backward=backward)
    case = Case(bounds=[[0, tokens], *[short] * 7], tokens=tokens, heads=heads, config=config)
    with posted(at_once):
        plan = check_late(case)
    assert plan.kv_transfers.passed_on.any()


def too_early(rank: int, world_size: int) -> float:
    sends, arrives = torch.ones(world_size, 1), torch.zeros(world_size, 1)
    each = [1] * world_size
    work = dist.all_to_all_single(arrives, sends, each, each, group=dist.group.WORLD, async_op=True)
    before = float(arrives.sum())
    work.wait()
    assert float(arrives.sum()) == world_size
    return before


def test_the_late_transport_shows_a_read_before_the_wait() -> None:
    with late(3):
        assert all(before != before for before in threaded_ranks(3, too_early))


def overwriting(rank: int, world_size: int) -> None:
    sends, arrives = torch.ones(world_size, 1), torch.zeros(world_size, 1)
    each = [1] * world_size
    work = dist.all_to_all_single(arrives, sends, each, each, group=dist.group.WORLD, async_op=True)
    sends.zero_()
    work.wait()


def test_and_a_write_while_rows_are_under_way() -> None:
    with late(3):
        errors = threaded_ranks(3, overwriting, expect_error=True)
    assert any("overwrote rows of message 0" in error for error in errors)
