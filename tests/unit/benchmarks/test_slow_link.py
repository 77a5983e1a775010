"""The slow-link benchmark where it cannot run, and what it makes of a pass's events."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from benchmarks.slow import network
from benchmarks.slow.events import (
    RETURNED,
    SENT,
    Post,
    RankEvents,
    exposure,
    middle_seconds,
    split_returns,
)
from benchmarks.slow_link import Args, main


def two_ranks(waits: dict[int, tuple[float, float]]) -> list[RankEvents]:
    """Rank 0 dispatches two chunks to rank 1, which returns the first at 5 and the second at 8."""
    home = [Post(SENT, 0, 100, 0), Post(SENT, 0, 100, 0), Post(RETURNED, 4, 0, 50)]
    away = [Post(SENT, 0, 0, 100), Post(SENT, 0, 0, 100), Post(RETURNED, 5, 50, 0)]
    return [
        RankEvents(
            start=0.0,
            end=9.5,
            posts=[*home, Post(RETURNED, 4, 0, 50)],
            waits={0: (4.0, 4.0), 1: (4.0, 4.0), 2: (4.5, 7.0), 3: (7.0, 9.0)},
            kernels=[(0.0, 4.0)],
        ),
        RankEvents(
            start=0.5,
            end=8.5,
            posts=[*away, Post(RETURNED, 8, 50, 0)],
            waits=waits,
            kernels=[(0.5, 1.0), (3.0, 5.0), (5.5, 8.0)],
        ),
    ]


def test_waits_between_kernels_and_after_the_last_are_told_apart() -> None:
    found = exposure(two_ranks({0: (1.0, 3.0), 1: (5.0, 5.25), 2: (8, 8), 3: (8, 8.5)}), chunks=2)
    assert (found.first, found.middle, found.last) == (2.0, 0.25, 1.0)
    assert (found.step, found.attended) == (9.0, 5.0)
    assert found.rest == pytest.approx(9.0 - 5.0 - 3.25)


def test_a_middle_return_that_ends_after_the_last_kernel_is_exposed_as_far_as_it_does() -> None:
    ranks = two_ranks({0: (1.0, 3.0), 1: (5.0, 5.0)})
    ranks[0].waits[2] = (4.5, 8.4)
    found = exposure(ranks, chunks=2)
    assert found.middle == pytest.approx(0.4)
    assert found.last == pytest.approx(0.6)


def test_a_return_waited_for_late_has_arrived_when_a_later_one_has() -> None:
    ranks = two_ranks({0: (1.0, 3.0), 1: (5.0, 5.0)})
    ranks[0].waits.update({3: (4.5, 9.0), 2: (9.0, 9.3)})  # the second is waited for first
    found = exposure(ranks, chunks=2)
    assert found.middle == pytest.approx(1.0)
    assert found.last == 0.0


def test_the_middle_is_all_but_the_first_dispatch_and_the_last_return() -> None:
    ranks = two_ranks({0: (1.0, 3.0), 1: (5.0, 5.25)})
    assert split_returns(ranks) == ([2], [3])
    assert middle_seconds({0: 1.0, 1: 2.0, 2: 4.0, 3: 8.0}, ranks, chunks=2) == 6.0


def test_ranks_that_posted_different_messages_are_refused() -> None:
    ranks = two_ranks({0: (1.0, 3.0), 1: (5.0, 5.25)})
    ranks[1].posts.pop()
    with pytest.raises(ValueError, match="messages"):
        exposure(ranks, chunks=2)


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"ranks": 5}, "--ranks"),
        ({"chunks": (1, 3)}, "--chunks"),
        ({"chunks": ()}, "--chunks"),
        ({"shares": (0.0,)}, "--shares"),
        ({"rates": (-1.0,)}, "--rates"),
        ({"repeats": 0}, "--repeats"),
        ({"tokens": 100}, "--tokens"),
        ({"nice": 20}, "--nice"),
    ],
)
def test_settings_that_cannot_run_are_refused(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Args(**arguments)  # type: ignore[arg-type]


def test_without_root_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    assert main([]) == 0
    assert capsys.readouterr().out == ("skipped: it needs root, to make network namespaces\n")


def test_without_its_tools_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert network.missing() == "tc not found; install iproute2 and util-linux"


def test_other_systems_have_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert network.missing() == "network namespaces are Linux's; this is darwin"
