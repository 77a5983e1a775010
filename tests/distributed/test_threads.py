"""Ranks as threads, and what both kinds of rank must offer: subgroups and device meshes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.outcomes import RankError
from tests.distributed.ranks import RankPool
from tests.distributed.test_ranks import (
    exchange_unevenly,
    fail_on_last_rank,
    leave_first_rank_waiting,
    refuse,
)
from tests.distributed.threads import threaded_ranks


def summed(value: float, group: dist.ProcessGroup) -> float:
    total = torch.tensor([value])
    dist.all_reduce(total, group=group)
    return total.item()


def halves_side_by_side(rank: int, world_size: int, local: bool) -> float:
    """Each half sums in a group of its own; `local`: the other half has no part in making it."""
    half = world_size // 2
    halves = [list(range(half)), list(range(half, world_size))]
    mine = rank // half
    if local:
        group = dist.new_group(halves[mine], use_local_synchronization=True)
    else:
        group = [dist.new_group(ranks) for ranks in halves][mine]
    total = summed(float(rank), group)
    if not local:
        dist.destroy_process_group(group)
    return total


def sums_along_a_mesh(rank: int, world_size: int) -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "cp"))
    return summed(rank, mesh["cp"].get_group()), summed(rank, mesh["dp"].get_group())


def broadcast_from_a_second_thread(rank: int, world_size: int) -> int:
    """The first thread reduces on one group while a second one broadcasts on another."""
    here, there = (dist.new_group(list(range(world_size))) for _ in range(2))
    news = torch.tensor([rank])
    second = threading.Thread(target=lambda: dist.broadcast(news, group_src=1, group=there))
    second.start()
    summed(1.0, here)
    second.join()
    return int(news)


@pytest.mark.parametrize("local", [False, True])
def test_two_groups_side_by_side(ranks4: RankPool, local: bool) -> None:
    assert ranks4.run(halves_side_by_side, local) == [1, 1, 5, 5]
    assert threaded_ranks(4, halves_side_by_side, local) == [1, 1, 5, 5]


def test_a_device_mesh_has_groups_by_name(ranks4: RankPool) -> None:
    sums = [(1, 2), (1, 4), (5, 2), (5, 4)]
    assert ranks4.run(sums_along_a_mesh) == sums
    assert threaded_ranks(4, sums_along_a_mesh) == sums


def test_a_second_thread_of_a_rank_has_that_ranks_groups(ranks4: RankPool) -> None:
    assert ranks4.run(broadcast_from_a_second_thread) == [1] * 4
    assert threaded_ranks(4, broadcast_from_a_second_thread) == [1] * 4


@pytest.mark.parametrize("world_size", [1, 8, 16])
def test_uneven_exchange_works_in_threads(world_size: int) -> None:
    assert all(threaded_ranks(world_size, exchange_unevenly))


def test_errors_of_all_threads_are_gathered() -> None:
    errors = threaded_ranks(8, refuse, expect_error=True)
    assert errors == [f"ValueError: rank {rank} says no" for rank in range(8)]


def test_an_error_in_one_thread_is_told_with_its_rank() -> None:
    with pytest.raises(RankError, match=r"ranks \[3\] raised") as failure:
        threaded_ranks(4, fail_on_last_rank, grace=0.2)
    assert "in fail_on_last_rank" in str(failure.value)


def test_a_hang_of_threads_fails_within_its_timeout_and_shows_where() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0\] of 4 gave no answer") as failure:
        threaded_ranks(4, leave_first_rank_waiting, timeout=0.5)
    assert time.monotonic() - begin < 10
    assert "in leave_first_rank_waiting" in str(failure.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert all(threaded_ranks(4, exchange_unevenly))
