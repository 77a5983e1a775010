"""Pipeline schedules: closed forms for equal times, and for any times a slow longest path."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost.pipeline import (
    Operation,
    Schedule,
    ScheduleName,
    most_in_flight,
    schedule_order,
    simulate_schedule,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ScheduleName, int, np.ndarray, np.ndarray, float]:
    """A schedule, its ranks, times in halves of a second (exact in floats) and a hop."""
    name: ScheduleName = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    ranks = draw(st.integers(1, 4))
    virtual = draw(st.integers(1, 3)) if name == "interleaved" else 1
    micros = draw(st.integers(1, 4)) * (ranks if name == "interleaved" else 1)
    shape = (ranks * virtual, micros)
    times = [
        np.array(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))).reshape(shape) / 2
        for n in (shape[0] * shape[1],) * 2
    ]
    return name, ranks, times[0], times[1], draw(st.sampled_from([0.0, 0.5, 3.0]))


def longest_path(schedule: Schedule, forward: np.ndarray, backward: np.ndarray, hop: float):
    """When every operation ends: the longest path through everything it must follow."""
    chunks = len(forward)
    previous = {after: before for line in schedule.order for before, after in pairwise(line)}

    @cache
    def end(operation: Operation) -> float:
        back, chunk, micro = operation
        starts = [0.0]
        if operation in previous:
            starts.append(end(previous[operation]))
        if not back and chunk > 0:
            far = (chunk - 1) % schedule.ranks != chunk % schedule.ranks
            starts.append(end(Operation(0, chunk - 1, micro)) + hop * far)
        if back and chunk < chunks - 1:
            far = (chunk + 1) % schedule.ranks != chunk % schedule.ranks
            starts.append(end(Operation(1, chunk + 1, micro)) + hop * far)
        if back:
            starts.append(end(Operation(0, chunk, micro)))
        return max(starts) + float((backward if back else forward)[chunk, micro])

    return end


@given(cases())
def test_every_operation_ends_where_the_longest_path_to_it_does(case) -> None:
    name, ranks, forward, backward, hop = case
    schedule = simulate_schedule(name, forward, backward, ranks=ranks, hop_seconds=hop)
    end = longest_path(schedule, forward, backward, hop)
    for chunk, micro in np.ndindex(forward.shape):
        assert schedule.end[0][chunk, micro] == end(Operation(0, chunk, micro))
        assert schedule.end[1][chunk, micro] == end(Operation(1, chunk, micro))


@given(cases())
def test_every_rank_does_each_of_its_operations_once_and_one_at_a_time(case) -> None:
    name, ranks, forward, backward, hop = case
    schedule = simulate_schedule(name, forward, backward, ranks=ranks, hop_seconds=hop)
    for rank, line in enumerate(schedule.order):
        mine = {
            Operation(back, chunk, micro)
            for back in (0, 1)
            for chunk in range(rank, len(forward), ranks)
            for micro in range(forward.shape[1])
        }
        assert len(line) == len(mine) and set(line) == mine
        free = 0.0
        for back, chunk, micro in line:
            start = schedule.start[1] if back else schedule.start[0]
            end = schedule.end[1] if back else schedule.end[0]
            assert start[chunk, micro] >= free
            free = end[chunk, micro]
            seconds = (backward if back else forward)[chunk, micro]
            assert end[chunk, micro] - start[chunk, micro] == seconds


@given(cases())
def test_no_operation_starts_before_what_it_needs_has_arrived(case) -> None:
    name, ranks, forward, backward, hop = case
    schedule = simulate_schedule(name, forward, backward, ranks=ranks, hop_seconds=hop)
    wait = hop if ranks > 1 else 0.0
    assert (schedule.start[0][1:] >= schedule.end[0][:-1] + wait).all()
    assert (schedule.start[1][:-1] >= schedule.end[1][1:] + wait).all()
    assert (schedule.start[1] >= schedule.end[0]).all()


@given(cases())
def test_idle_time_work_and_makespan_add_up(case) -> None:
    name, ranks, forward, backward, hop = case
    schedule = simulate_schedule(name, forward, backward, ranks=ranks, hop_seconds=hop)
    work = forward.sum() + backward.sum()
    assert schedule.busy.sum() == pytest.approx(work)
    assert schedule.makespan >= schedule.busy.max()
    if work:
        whole = ranks * schedule.makespan
        assert schedule.bubble_share == pytest.approx((whole - work) / whole)
    else:
        assert schedule.bubble_share == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_with_equal_times_gpipe_and_1f1b_idle_p_less_1_of_m_and_p_less_1(
    name: ScheduleName, ranks: int, micros: int
) -> None:
    shape = (ranks, micros)
    schedule = simulate_schedule(name, np.full(shape, 2.0), np.full(shape, 4.0))
    assert schedule.makespan == (micros + ranks - 1) * 6
    assert schedule.bubble_share == pytest.approx((ranks - 1) / (micros + ranks - 1))


@pytest.mark.parametrize("ranks, micros", [(1, 3), (2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_with_equal_times_interleaving_divides_the_bubble_by_the_chunks_of_a_rank(
    ranks: int, micros: int, virtual: int
) -> None:
    shape = (ranks * virtual, micros)
    schedule = simulate_schedule(
        "interleaved", np.full(shape, 1.0), np.full(shape, 2.0), ranks=ranks
    )
    idle = ranks - 1
    assert schedule.bubble_share == pytest.approx(idle / (micros * virtual + idle))
    assert schedule.makespan == (micros * virtual + ranks - 1) * 3


@given(cases(), st.data())
def test_nothing_that_takes_longer_ends_anything_sooner(case, data) -> None:
    name, ranks, forward, backward, hop = case
    before = simulate_schedule(name, forward, backward, ranks=ranks, hop_seconds=hop)
    chunk = data.draw(st.integers(0, len(forward) - 1))
    micro = data.draw(st.integers(0, forward.shape[1] - 1))
    forward = forward.copy()
    forward[chunk, micro] += 1
    after = simulate_schedule(name, forward, backward, ranks=ranks, hop_seconds=hop)
    assert (after.end[1] >= before.end[1]).all()


def test_1f1b_holds_no_more_microbatches_than_stages_and_gpipe_all() -> None:
    assert [most_in_flight(line) for line in schedule_order("1f1b", 4, 16)] == [4, 3, 2, 1]
    assert [most_in_flight(line) for line in schedule_order("gpipe", 4, 16)] == [16] * 4
    # Chunks of interleaving: p (v - 1) + 2 (p - 1) + 1 on the first rank.
    assert most_in_flight(schedule_order("interleaved", 4, 16, virtual_stages=2)[0]) == 11


def test_one_slow_microbatch_delays_every_stage_behind_it() -> None:
    forward = np.array([[1.0, 5.0, 1.0, 1.0], [1.0, 5.0, 1.0, 1.0]])
    schedule = simulate_schedule("1f1b", forward, forward)
    # rank 0 | F0 F1 ........ B0 F2 ........ B1 ........ F3 B2 .. B3
    # rank 1 | .. F0 B0 .... F1 ........ B1 ........ F2 B2 .... F3 B3
    assert schedule.start[0][1].tolist() == [1, 6, 16, 22]
    assert schedule.start[1][0].tolist() == [6, 16, 22, 24]
    assert schedule.makespan == 25


def test_further_dimensions_are_pipelines_of_their_own() -> None:
    draw = np.random.default_rng(5)
    forward, backward = draw.random((2, 6, 4, 3))
    together = simulate_schedule("interleaved", forward, backward, ranks=2, hop_seconds=0.1)
    assert together.makespan.shape == together.bubble_share.shape == (3,)
    for i in range(3):
        alone = simulate_schedule(
            "interleaved", forward[..., i], backward[..., i], ranks=2, hop_seconds=0.1
        )
        assert together.makespan[i] == alone.makespan
        assert (together.busy[:, i] == alone.busy).all()


ONES = np.ones((2, 3))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f1b", ONES, np.ones((3, 2))), "shape"),
        (("1f1b", np.ones(3), np.ones(3)), r"\[chunks, microbatches\]"),
        (("1f1b", np.ones((0, 3)), np.ones((0, 3))), r"\[chunks, microbatches\]"),
        (("1f1b", -ONES, ONES), r"forward_seconds\[0, 0\] is -1"),
        (("1f1b", ONES, ONES * np.nan), r"backward_seconds\[0, 0\] is nan"),
        (("1f1b", [["fast"]], [[1]]), "it must hold numbers"),
        (("2f2b", ONES, ONES), "schedule is '2f2b'; choose one of"),
        (("interleaved", ONES, ONES), "pp 2 does not divide the 3 microbatches"),
    ],
)
def test_what_cannot_be_played_is_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_schedule(*arguments)


@pytest.mark.parametrize(
    "ranks, message", [(3, "must divide"), (0, "ranks is 0"), (1, "one model")]
)
def test_ranks_that_do_not_fit_are_refused(ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_schedule("1f1b", np.ones((2, 3)), np.ones((2, 3)), ranks=ranks)


def test_a_hop_that_takes_no_sensible_time_is_refused() -> None:
    with pytest.raises(ValueError, match="hop_seconds"):
        simulate_schedule("1f1b", ONES, ONES, hop_seconds=-1)
