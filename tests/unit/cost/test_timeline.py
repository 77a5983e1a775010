"""The modelled timeline: small cases by hand, and what must hold for every pool."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from libra.config import HeadShape
from libra.cost.timeline import Timeline, TimeModel, pool_timeline
from libra.plan.traffic import PoolTraffic

HEADS = HeadShape(q=1, kv=1, dim=1, bytes=2)  # four operations a pair
# One pair and ten bytes a second near, five far; a second of latency.
BACKWARD_WAYS = ("dispatched", "relayed", "collected", "returned")
MODEL = TimeModel(
    flops_per_second=4.0,
    within_node=10.0,
    between_nodes=5.0,
    latency_seconds=1.0,
    ranks_per_node=2,
)


def traffic(
    local: ArrayLike, pairs: ArrayLike, dispatched: ArrayLike, returned: ArrayLike
) -> PoolTraffic:
    """Counts that matter for time: local [W], pairs [W, M], bytes [M, W, W]."""
    nothing = np.zeros(len(np.asarray(local)), dtype=np.int64)
    arrays = [np.asarray(values, dtype=np.int64) for values in (local, pairs, dispatched, returned)]
    names = ("local_pairs", "pairs", "dispatched", "returned")
    rest = ("fetched_q", "fetched_kv", "remote_o", "segments", "launches")
    fields: dict[str, Any] = dict(zip(names, arrays, strict=True)) | dict.fromkeys(rest, nothing)
    still = np.zeros_like(fields["dispatched"])
    others = ("relayed", *(f"backward_{way}" for way in BACKWARD_WAYS))
    return PoolTraffic(**fields, **dict.fromkeys(others, still))


def test_without_exchanges_a_worker_finishes_when_it_has_computed() -> None:
    none = np.zeros((2, 2, 2))
    line = pool_timeline(traffic([5, 3], [[0, 0], [1, 2]], none, none), HEADS, MODEL)
    assert line.finish.tolist() == [5, 6]
    assert line.exposed.tolist() == [0, 0]
    assert line.makespan == 6
    assert line.dispatch_end.tolist() == np.zeros((2, 2)).tolist()


def test_a_worker_without_local_work_waits_for_the_dispatch_and_its_peer_for_the_return() -> None:
    #            0        11     15      21
    # worker 1   |dispatch|attend|       |        local work of 3 s before the dispatch is there
    # worker 0   |dispatch|      |return |        local work of 5 s
    line = pool_timeline(
        traffic([5, 3], [[0], [4]], [[[0, 100], [0, 0]]], [[[0, 0], [50, 0]]]), HEADS, MODEL
    )
    assert line.dispatch_end.tolist() == [[11], [11]]
    assert line.attend_start[1] == 11
    assert line.attend_end[1] == 15
    assert line.return_start.tolist() == [[15], [15]]  # its sender computes until then
    assert line.return_end.tolist() == [[21], [21]]
    assert line.compute.tolist() == [5, 7]
    assert line.exposed.tolist() == [16, 14]


def test_the_next_dispatch_travels_while_a_chunk_computes_and_returns_queue_behind_it() -> None:
    moves = [[0, 90], [0, 0]]
    back = [[0, 0], [40, 0]]
    line = pool_timeline(
        traffic([0, 0], [[0, 0], [4, 20]], [moves, moves], [back, back]), HEADS, MODEL
    )
    assert line.dispatch_start[1].tolist() == [0, 10]
    assert line.dispatch_end[1].tolist() == [10, 20]
    assert line.attend_start[1].tolist() == [10, 20]
    assert line.attend_end[1].tolist() == [14, 40]
    assert line.return_start[1].tolist() == [20, 40]  # chunk 0 is done at 14, the network at 20
    assert line.return_end[1].tolist() == [25, 45]
    assert line.makespan == 45


def test_local_work_hides_the_first_dispatch() -> None:
    moved, back = [[[0, 100], [0, 0]]], [[[0, 0], [0, 0]]]
    line = pool_timeline(traffic([0, 30], [[0], [4]], moved, back), HEADS, MODEL)
    assert line.attend_start[1] == 30
    assert line.exposed[1] == 0


def test_links_within_a_node_and_between_nodes_work_side_by_side() -> None:
    # Worker 0 sends 70 bytes to its neighbour (7 s) and 40 to the other node (8 s).
    moved = np.zeros((1, 4, 4))
    moved[0, 0, 1], moved[0, 0, 2] = 70, 40
    line = pool_timeline(traffic([0] * 4, [[0]] * 4, moved, 0 * moved), HEADS, MODEL)
    assert line.dispatch_end[:, 0].tolist() == [9, 8, 9, 1]  # latency included, even for worker 3


def test_what_a_worker_sends_and_receives_overlap() -> None:
    both = [[[0, 100], [60, 0]]]
    line = pool_timeline(traffic([0, 0], [[0], [0]], both, 0 * np.array(both)), HEADS, MODEL)
    assert line.dispatch_end[:, 0].tolist() == [11, 11]


def test_relays_pass_on_what_has_come_and_the_next_chunk_waits_for_them() -> None:
    # Worker 0 sends 40 bytes to each of 1 and 2 (near and far: 4 s, 8 s), who exchange halves.
    #            0       9         14      23
    # worker 2   |dispatch| passes on|  1   |         the next chunk's dispatch brings it 40 bytes
    chunk = np.array([[0, 40, 40], [0, 0, 0], [0, 0, 0]])
    relayed = np.array([[0, 0, 0], [0, 0, 20], [0, 20, 0]])
    still = np.zeros((3, 3), dtype=int)
    counts = dataclasses.replace(
        traffic([0] * 3, [[0, 0]] * 3, [chunk, chunk], [still, still]),
        relayed=np.array([relayed, still]),
    )
    line = pool_timeline(counts, HEADS, MODEL)
    assert line.dispatch_start[2].tolist() == [0, 14]
    assert line.dispatch_end[2].tolist() == [14, 23]
    assert line.dispatch_end[0].tolist() == [10, 19]  # it has nothing to pass on, but the latency


def test_gradients_go_to_relays_before_they_return() -> None:
    still = np.zeros((1, 2, 2), dtype=int)
    counts = dataclasses.replace(
        traffic([0, 0], [[0], [0]], still, still),
        backward_collected=np.array([[[0, 30], [0, 0]]]),
        backward_returned=np.array([[[0, 0], [50, 0]]]),
    )
    line = pool_timeline(counts, HEADS, MODEL, direction="backward")
    assert line.return_start.tolist() == [[0], [0]]
    assert line.return_end.tolist() == [[10], [10]]  # 3 s, then 5 s, each with a second of latency


def test_flops_count_keys_and_values_of_their_own_width() -> None:
    none = np.zeros((1, 1, 1))
    wide = HeadShape(q=1, kv=1, dim=3, v_dim=1)
    line = pool_timeline(traffic([1], [[0]], none, none), wide, MODEL)
    assert line.makespan == 2 * (3 + 1) / 4


def test_backward_moves_its_own_bytes_and_computes_five_products_for_the_forwards_two() -> None:
    forward = traffic([4, 2], [[0], [4]], [[[0, 100], [0, 0]]], [[[0, 0], [50, 0]]])
    counts = dataclasses.replace(
        forward,
        backward_dispatched=np.array([[[0, 50], [0, 0]]]),
        backward_returned=np.array([[[0, 0], [90, 0]]]),
    )
    line = pool_timeline(counts, HEADS, MODEL, direction="backward")
    assert line.local_end.tolist() == [10, 5]  # at 2.5 s a pair
    assert line.dispatch_end.tolist() == [[6], [6]]
    assert line.attend_start[1] == 6
    assert line.attend_end[1] == 16
    assert line.return_end.tolist() == [[26], [26]]


def test_backward_flops_count_keys_three_times_and_values_twice() -> None:
    none = np.zeros((1, 1, 1))
    wide = HeadShape(q=1, kv=1, dim=3, v_dim=1)
    line = pool_timeline(traffic([1], [[0]], none, none), wide, MODEL, direction="backward")
    assert line.makespan == 2 * (3 * 3 + 2 * 1) / 4


def test_seconds_of_measured_kernels_take_the_place_of_the_rate() -> None:
    counts = traffic([5, 3], [[0], [4]], [[[0, 100], [0, 0]]], [[[0, 0], [50, 0]]])
    seconds = np.array([2.0, 12.0]), np.array([[0.0], [3.0]])
    line = pool_timeline(counts, HEADS, MODEL, attend=seconds)
    assert line.local_end.tolist() == [2, 12]
    assert line.attend_start[1] == 12
    assert line.attend_end[1] == 15
    assert line.compute.tolist() == [2, 15]


@pytest.mark.parametrize(
    "local, chunks, message",
    [
        ([0.0], [[0.0]], r"shapes \(1,\) and \(1, 1\); this pool needs"),
        ([0.0, 0.0], [0.0, 0.0], r"\[2, 1\]"),
        ([0.0, -1.0], [[0.0], [0.0]], "negative or not finite"),
        ([0.0, 0.0], [[0.0], [float("nan")]], "negative or not finite"),
    ],
)
def test_seconds_of_another_pool_or_none_at_all_are_refused(
    local: ArrayLike, chunks: ArrayLike, message: str
) -> None:
    none = np.zeros((1, 2, 2))
    with pytest.raises(ValueError, match=message):
        pool_timeline(
            traffic([0, 0], [[0], [0]], none, none),
            HEADS,
            MODEL,
            attend=(np.array(local), np.array(chunks)),
        )


def test_another_direction_is_refused() -> None:
    none: Any = np.zeros((1, 1, 1))
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        pool_timeline(traffic([0], [[0]], none, none), HEADS, MODEL, direction="sideways")  # type: ignore[arg-type]


def starts_and_ends(line: Timeline) -> np.ndarray:
    return np.concatenate([getattr(line, f.name).ravel() for f in dataclasses.fields(line)])


@st.composite
def traffics(draw: st.DrawFn) -> PoolTraffic:
    workers, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def counts(*shape: int) -> np.ndarray:
        return rng.integers(0, 60, shape) * rng.integers(0, 2, shape)

    moved = [counts(chunks, workers, workers) * (1 - np.eye(workers, dtype=int)) for _ in range(2)]
    return traffic(counts(workers), counts(workers, chunks), *moved)


@given(traffics())
def test_a_faster_machine_is_never_later_anywhere(counts: PoolTraffic) -> None:
    before = starts_and_ends(pool_timeline(counts, HEADS, MODEL))
    for faster in (
        {"within_node": 17.0},
        {"between_nodes": 9.0},
        {"flops_per_second": 5.0},
        {"latency_seconds": 0.5},
    ):
        model = dataclasses.replace(MODEL, **faster)
        assert (starts_and_ends(pool_timeline(counts, HEADS, model)) <= before + 1e-9).all()


@given(traffics())
def test_the_order_of_the_pipeline_holds_for_every_worker(counts: PoolTraffic) -> None:
    line = pool_timeline(counts, HEADS, MODEL)
    assert (line.dispatch_end[:, :-1] <= line.dispatch_start[:, 1:]).all()
    assert (line.attend_start[:, 0] >= line.local_end).all()
    assert (line.attend_start >= line.dispatch_end).all()
    assert (line.attend_end[:, :-1] <= line.attend_start[:, 1:]).all()
    assert (line.return_start >= line.attend_end).all()
    assert (line.return_start >= line.dispatch_end[:, -1:]).all()
    assert (line.return_end[:, :-1] <= line.return_start[:, 1:]).all()
    assert (line.exposed >= -1e-9).all()
    assert line.makespan >= line.compute.max()


@pytest.mark.parametrize(
    "setting",
    [
        {"flops_per_second": 0.0},
        {"within_node": float("inf")},
        {"between_nodes": float("nan")},
        {"latency_seconds": -1e-6},
        {"ranks_per_node": 0},
    ],
)
def test_impossible_rates_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        TimeModel(**setting)
