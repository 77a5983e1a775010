"""The harness itself: ranks that live on between cases, and cases that can't hang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.outcomes import Lost, Raised, RankError
from tests.distributed.ranks import RankPool

KEPT: dict[str, Any] = {}


def scale(rank: int, world_size: int, factor: int) -> tuple[int, int, int]:
    return rank, world_size, rank * factor


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def keep_group(rank: int, world_size: int) -> None:
    KEPT["group"] = dist.new_group(list(range(world_size)))


def sum_on_kept_group(rank: int, world_size: int) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=KEPT["group"])
    return total.item()


def exchange_unevenly(rank: int, world_size: int) -> bool:
    """Rank r sends (r + s) % 3 rows to rank s; some splits are zero."""
    splits = [(rank + other) % 3 for other in range(world_size)]
    sent = torch.full((sum(splits), 2), float(rank))
    received = torch.empty(sum(splits), 2)
    dist.all_to_all_single(received, sent, splits, splits, async_op=True).wait()
    sources = [float(other) for other, rows in enumerate(splits) for _ in range(rows)]
    return received[:, 0].tolist() == sources


def leave_first_rank_waiting(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()


def fail_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def die_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGFPE)
    time.sleep(60)


def refuse(rank: int, world_size: int) -> None:
    raise ValueError(f"rank {rank} says no")


def refuse_a_collective_ahead(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier(async_op=True)
    raise ValueError("out of step")


def refuse_on_first_rank(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("only me")


def test_results_come_back_by_rank(ranks4: RankPool) -> None:
    assert ranks4.run(scale, 3) == [(0, 4, 0), (1, 4, 3), (2, 4, 6), (3, 4, 9)]


def test_each_rank_can_have_its_own_arguments(ranks2: RankPool) -> None:
    assert ranks2.run_each(scale, [[5], [7]]) == [(0, 2, 0), (1, 2, 7)]
    with pytest.raises(ValueError, match="1 argument lists for 2 ranks"):
        ranks2.run_each(scale, [[5]])


def test_uneven_exchange_works_in_processes(ranks4: RankPool) -> None:
    assert all(ranks4.run(exchange_unevenly))


def test_state_and_groups_persist_between_cases(ranks2: RankPool) -> None:
    before = ranks2.run(process_id)
    ranks2.run(keep_group)
    assert ranks2.run(sum_on_kept_group) == [1.0, 1.0]
    assert ranks2.run(process_id) == before


def test_a_hang_fails_within_its_timeout_and_shows_where(ranks2: RankPool) -> None:
    hung = ranks2.run(process_id)
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0\] of 2 gave no answer") as failure:
        ranks2.run(leave_first_rank_waiting, timeout=1.0)
    assert time.monotonic() - begin < 10
    assert "in leave_first_rank_waiting" in str(failure.value)
    for pid in hung:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert set(ranks2.run(process_id)).isdisjoint(hung)


def test_an_error_on_one_rank_is_told_with_its_rank(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] raised") as failure:
        ranks2.run(fail_on_last_rank, grace=0.5)
    waiting, raised = failure.value.outcomes
    assert isinstance(waiting, Lost)
    assert isinstance(raised, Raised)
    assert raised.error == "ValueError: rank 1 has had enough"
    assert "in fail_on_last_rank" in raised.traceback
    assert ranks2.run(scale, 1) == [(0, 2, 0), (1, 2, 1)]


def test_a_rank_that_dies_is_told_with_its_signal(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="killed by SIGFPE"):
        ranks2.run(die_on_last_rank, grace=0.5)


def test_expected_errors_come_back_by_rank_and_the_ranks_live_on(ranks2: RankPool) -> None:
    before = ranks2.run(process_id)
    errors = ranks2.run(refuse, expect_error=True)
    assert errors == ["ValueError: rank 0 says no", "ValueError: rank 1 says no"]
    assert ranks2.run(process_id) == before


def test_ranks_out_of_step_after_an_expected_error_start_anew(ranks2: RankPool) -> None:
    before = ranks2.run(process_id)
    ranks2.run(refuse_a_collective_ahead, expect_error=True)
    assert set(ranks2.run(process_id)).isdisjoint(before)


def test_an_error_that_is_due_on_every_rank_and_missing_on_one_fails(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] returned, an error was due"):
        ranks2.run(refuse_on_first_rank, expect_error=True)
