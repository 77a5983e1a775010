"""Waiting for an operation, and naming the rank that is lost."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch.distributed as dist

from libra.runtime import failure
from libra.runtime.failure import BrokenGroupError, finish, naming_lost_ranks

GROUP = mock.Mock()


def work(*, waits: list[object], completes_after: int) -> mock.Mock:
    """An operation that is complete after so many looks, and these results of its waits."""
    operation = mock.Mock()
    operation.is_completed.side_effect = [False] * completes_after + [True] * 9
    operation.wait.side_effect = waits
    return operation


def test_an_operation_that_ends_well_returns() -> None:
    finish(work(waits=[True], completes_after=0), GROUP)


def test_an_operation_that_fails_breaks_the_group() -> None:
    with pytest.raises(BrokenGroupError, match="connection closed"):
        finish(work(waits=[RuntimeError("connection closed")], completes_after=0), GROUP)


def test_a_wait_ends_once_this_rank_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = threading.Event()
    leaving.set()
    monkeypatch.setattr(failure, "process_ends", leaving)
    with pytest.raises(BrokenGroupError, match="ending"):
        finish(work(waits=[RuntimeError("timeout")], completes_after=9), GROUP)


def test_a_wait_ends_once_another_rank_calls_the_roll(store: dist.HashStore) -> None:
    store.set("libra/lost/4/called", "")
    with (
        mock.patch.object(dist, "get_process_group_ranks", return_value=[4, 5]),
        pytest.raises(BrokenGroupError, match="another rank"),
    ):
        finish(work(waits=[RuntimeError("timeout")], completes_after=9), GROUP)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """The store of a job in which this is rank 4."""
    store = dist.HashStore()
    monkeypatch.setattr(failure, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    monkeypatch.setattr(failure, "_GRACE_SECONDS", 0.15)
    return store


def told(ranks: list[int]) -> str:
    with pytest.raises(RuntimeError) as error, naming_lost_ranks("planning", ranks):
        raise BrokenGroupError("it broke")
    return str(error.value)


def test_ranks_that_do_not_sign_in_are_named(store: dist.HashStore) -> None:
    store.set("libra/lost/4/5", "here")
    assert told([4, 5, 6, 7]) == (
        "planning failed in the pool of ranks [4, 5, 6, 7]: rank 6, 7 no longer answers (it broke)"
    )


def test_a_failure_without_a_lost_rank_says_so(store: dist.HashStore) -> None:
    store.set("libra/lost/4/5", "here")
    assert "all ranks still answer" in told([4, 5])


@pytest.mark.parametrize("ranks, names_rank_0", [([0, 4], True), ([4, 5], False)])
def test_a_store_that_does_not_answer_has_lost_its_host(
    monkeypatch: pytest.MonkeyPatch, ranks: list[int], names_rank_0: bool
) -> None:
    monkeypatch.setattr(failure, "default_store", mock.Mock(side_effect=RuntimeError("gone")))
    text = told(ranks)
    assert "store does not answer" in text
    assert ("rank 0 no longer answers" in text) == names_rank_0


def test_other_errors_pass_through() -> None:
    with pytest.raises(KeyError), naming_lost_ranks("planning", [0]):
        raise KeyError("a mistake")
