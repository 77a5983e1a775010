"""Attention seconds of a pool: every call of every worker, one by one; timelines of small cases by
hand, and what must hold for every pool.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from libra.config import HeadShape, PoolConfig
from libra.cost import CLUSTERS, AttentionTime, published_table
from libra.cost.attention_time import Timeline, attend_seconds, pool_timeline
from libra.cost.hardware import Cluster
from libra.cost.kernel_table import Direction
from libra.plan.attention_calls import LOCAL, pool_segments
from libra.plan.plan_pool import plan_pool
from libra.plan.rank_plan import make_rank_plan
from libra.plan.traffic import PoolTraffic

HEADS = HeadShape(q=8, kv=2, dim=16)
PACKS = [[0, 4096], [0, 100, 700, 4096], [0, 1, 2000, 4096], [0, 2048, 4096]]
BACKWARD_WAYS = ("dispatched", "passed_on", "collected", "returned")
# Ten bytes a second within a node of two, five between nodes; a second of latency.
CLUSTER = Cluster(
    name="test",
    peak_flops=1.0,
    memory_bytes=1.0,
    memory_bandwidth=1.0,
    within_node=20.0,
    between_nodes=10.0,
    between_nodes_latency=1.0,
    ranks_per_node=2,
    collective_efficiency=0.5,
)


def traffic(
    local: ArrayLike, pairs: ArrayLike, dispatched: ArrayLike, returned: ArrayLike
) -> PoolTraffic:
    """Counts that matter for time: local [W], pairs [W, M], bytes [M, W, W]."""
    nothing = np.zeros(len(np.asarray(local)), dtype=np.int64)
    arrays = [np.asarray(values, dtype=np.int64) for values in (local, pairs, dispatched, returned)]
    names = ("local_pairs", "pairs", "dispatched", "returned")
    rest = ("fetched_q", "fetched_kv", "peer_out", "segments", "calls")
    fields: dict[str, Any] = dict(zip(names, arrays, strict=True)) | dict.fromkeys(rest, nothing)
    still = np.zeros_like(fields["dispatched"])
    others = ("passed_on", *(f"backward_{way}" for way in BACKWARD_WAYS))
    return PoolTraffic(**fields, **dict.fromkeys(others, still))


def play(
    counts: PoolTraffic,
    cluster: Cluster = CLUSTER,
    *,
    direction: Direction = "forward",
    tp: int = 1,
) -> Timeline:
    """The timeline of workers that compute one pair a second."""
    attend = np.column_stack([counts.local_pairs, counts.pairs]).astype(np.float64)
    return pool_timeline(counts, attend, cluster, direction=direction, tp=tp)


def test_without_exchanges_a_worker_finishes_when_it_has_computed() -> None:
    none = np.zeros((2, 2, 2))
    line = play(traffic([5, 3], [[0, 0], [1, 2]], none, none))
    assert line.finish.tolist() == [5, 6]
    assert line.exposed.tolist() == [0, 0]
    assert line.makespan == 6
    assert line.dispatch.end.tolist() == np.zeros((2, 2)).tolist()


def test_a_worker_without_local_work_waits_for_the_dispatch_and_its_peer_for_the_return() -> None:
    #            0        11     15      21
    # worker 1   |dispatch|attend|       |        local work of 3 s before the dispatch is there
    # worker 0   |dispatch|      |return |        local work of 5 s
    line = play(traffic([5, 3], [[0], [4]], [[[0, 100], [0, 0]]], [[[0, 0], [50, 0]]]))
    assert line.dispatch.end.tolist() == [[11], [11]]
    assert line.attend.start[1] == 11
    assert line.attend.end[1] == 15
    assert line.returns.start.tolist() == [[15], [15]]  # its sender computes until then
    assert line.returns.end.tolist() == [[21], [21]]
    assert line.compute.tolist() == [5, 7]
    assert line.exposed.tolist() == [16, 14]


def test_the_next_dispatch_travels_while_a_chunk_computes_and_returns_queue_behind_it() -> None:
    moves = [[0, 90], [0, 0]]
    back = [[0, 0], [40, 0]]
    line = play(traffic([0, 0], [[0, 0], [4, 20]], [moves, moves], [back, back]))
    assert line.dispatch.start[1].tolist() == [0, 10]
    assert line.dispatch.end[1].tolist() == [10, 20]
    assert line.attend.start[1].tolist() == [10, 20]
    assert line.attend.end[1].tolist() == [14, 40]
    assert line.returns.start[1].tolist() == [20, 40]  # chunk 0 is done at 14, the network at 20
    assert line.returns.end[1].tolist() == [25, 45]
    assert line.makespan == 45


def test_local_work_hides_the_first_dispatch() -> None:
    moved, back = [[[0, 100], [0, 0]]], [[[0, 0], [0, 0]]]
    line = play(traffic([0, 30], [[0], [4]], moved, back))
    assert line.attend.start[1] == 30
    assert line.exposed[1] == 0


def test_links_within_a_node_and_between_nodes_work_side_by_side() -> None:
    # Worker 0 sends 70 bytes to its neighbour (7 s) and 40 to the other node (8 s).
    moved = np.zeros((1, 4, 4))
    moved[0, 0, 1], moved[0, 0, 2] = 70, 40
    line = play(traffic([0] * 4, [[0]] * 4, moved, 0 * moved))
    assert line.dispatch.end[:, 0].tolist() == [9, 8, 9, 1]  # latency included, even for worker 3


def test_workers_of_two_ranks_each_fill_a_node() -> None:
    moved = [[[0, 100], [0, 0]]]
    line = play(traffic([0, 0], [[0], [0]], moved, 0 * np.array(moved)), tp=2)
    assert line.dispatch.end[:, 0].tolist() == [21, 21]  # between nodes, at five bytes a second


def test_what_a_worker_sends_and_receives_overlap() -> None:
    both = [[[0, 100], [60, 0]]]
    line = play(traffic([0, 0], [[0], [0]], both, 0 * np.array(both)))
    assert line.dispatch.end[:, 0].tolist() == [11, 11]


def test_relays_pass_on_what_has_come_and_the_next_chunk_waits_for_them() -> None:
    # Worker 0 sends 40 bytes to each of 1 and 2 (near and far: 4 s, 8 s), who exchange halves.
    #            0       9         14      23
    # worker 2   |dispatch| passes on|  1   |         the next chunk's dispatch brings it 40 bytes
    chunk = np.array([[0, 40, 40], [0, 0, 0], [0, 0, 0]])
    relayed = np.array([[0, 0, 0], [0, 0, 20], [0, 20, 0]])
    still = np.zeros((3, 3), dtype=int)
    counts = dataclasses.replace(
        traffic([0] * 3, [[0, 0]] * 3, [chunk, chunk], [still, still]),
        passed_on=np.array([relayed, still]),
    )
    line = play(counts)
    assert line.dispatch.start[2].tolist() == [0, 14]
    assert line.dispatch.end[2].tolist() == [14, 23]
    assert line.dispatch.end[0].tolist() == [10, 19]  # it has nothing to pass on, but the latency


def test_gradients_go_to_relays_before_they_return() -> None:
    still = np.zeros((1, 2, 2), dtype=int)
    counts = dataclasses.replace(
        traffic([0, 0], [[0], [0]], still, still),
        backward_collected=np.array([[[0, 30], [0, 0]]]),
        backward_returned=np.array([[[0, 0], [50, 0]]]),
    )
    line = play(counts, direction="backward")
    assert line.returns.start.tolist() == [[0], [0]]
    assert line.returns.end.tolist() == [[10], [10]]  # 3 s, then 5 s, each with a second of latency


def test_backward_moves_its_own_bytes() -> None:
    forward = traffic([4, 2], [[0], [4]], [[[0, 100], [0, 0]]], [[[0, 0], [50, 0]]])
    counts = dataclasses.replace(
        forward,
        backward_dispatched=np.array([[[0, 50], [0, 0]]]),
        backward_returned=np.array([[[0, 0], [90, 0]]]),
    )
    line = play(counts, direction="backward")
    assert line.dispatch.end.tolist() == [[6], [6]]
    assert line.attend.start[1] == 6
    assert line.attend.end[1] == 10
    assert line.returns.end.tolist() == [[20], [20]]


def test_workers_compute_for_the_seconds_given() -> None:
    counts = traffic([5, 3], [[0], [4]], [[[0, 100], [0, 0]]], [[[0, 0], [50, 0]]])
    attend = np.array([[2.0, 0.0], [12.0, 3.0]])
    line = pool_timeline(counts, attend, CLUSTER, direction="forward")
    assert line.local_end.tolist() == [2, 12]
    assert line.attend.start[1] == 12
    assert line.attend.end[1] == 15
    assert line.compute.tolist() == [2, 15]


@pytest.mark.parametrize(
    "attend, message",
    [
        ([[0.0, 0.0]], r"attend has shape \(1, 2\); it must be \(2, 2\), from the pool's workers"),
        ([[0.0], [0.0]], r"attend has shape \(2, 1\)"),
        ([[0.0, 0.0], [-1.0, 0.0]], r"attend\[1, 0\] is -1.0"),
        ([[0.0, 0.0], [0.0, float("nan")]], r"attend\[1, 1\] is nan"),
    ],
)
def test_seconds_of_another_pool_or_none_at_all_are_refused(
    attend: list[list[float]], message: str
) -> None:
    none = np.zeros((1, 2, 2))
    with pytest.raises(ValueError, match=message):
        pool_timeline(
            traffic([0, 0], [[0], [0]], none, none),
            np.array(attend),
            CLUSTER,
            direction="forward",
        )


def test_another_direction_is_refused() -> None:
    none: Any = np.zeros((1, 1, 1))
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        play(traffic([0], [[0]], none, none), direction="sideways")  # type: ignore[arg-type]


def starts_and_ends(line: Timeline) -> np.ndarray:
    """Every time of a timeline, flat."""
    spans = [*line.dispatch, *line.attend, *line.returns]
    return np.concatenate([line.compute, line.local_end, *(times.ravel() for times in spans)])


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
    before = starts_and_ends(play(counts))
    for faster in (
        {"within_node": 34.0},
        {"between_nodes": 18.0},
        {"between_nodes_latency": 0.5},
        {"collective_efficiency": 0.6},
    ):
        cluster = dataclasses.replace(CLUSTER, **faster)
        assert (starts_and_ends(play(counts, cluster)) <= before + 1e-9).all()
    attend = np.column_stack([counts.local_pairs, counts.pairs]) * 0.8
    line = pool_timeline(counts, attend, CLUSTER, direction="forward")
    assert (starts_and_ends(line) <= before + 1e-9).all()


@given(traffics())
def test_the_order_of_the_pipeline_holds_for_every_worker(counts: PoolTraffic) -> None:
    line = play(counts)
    assert (line.dispatch.end[:, :-1] <= line.dispatch.start[:, 1:]).all()
    assert (line.attend.start[:, 0] >= line.local_end).all()
    assert (line.attend.start >= line.dispatch.end).all()
    assert (line.attend.end[:, :-1] <= line.attend.start[:, 1:]).all()
    assert (line.returns.start >= line.attend.end).all()
    assert (line.returns.start >= line.dispatch.end[:, -1:]).all()
    assert (line.returns.end[:, :-1] <= line.returns.start[:, 1:]).all()
    assert (line.exposed >= -1e-9).all()
    assert line.makespan >= line.compute.max()


@pytest.mark.parametrize("placement", ["surplus", "paper"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_seconds_are_those_of_all_calls_of_the_rank_plans(placement, direction) -> None:
    config = PoolConfig(pool_size=4, block_size=512, chunks=2, placement=placement)
    plan = plan_pool(PACKS, cp_size=2, config=config, heads=HEADS)
    table = published_table(CLUSTERS["h100"], key_dim=16, value_dim=16)
    workers, chunks = plan.workers, plan.head_groups.chunks
    local, waiting = np.zeros(workers), np.zeros((workers, chunks))
    for worker in range(workers):
        for launch in make_rank_plan(plan, worker).calls:
            segments = launch
            seconds = table.call_seconds
            for q_len, k_len in zip(segments.q_len, segments.k_len, strict=True):
                seconds += float(
                    table.seconds(int(q_len), int(k_len), segments.heads, direction=direction)
                )
            if launch.chunk == LOCAL:
                local[worker] += seconds
            else:
                waiting[worker, launch.chunk] += seconds
    found = attend_seconds(pool_segments(plan), table, (workers, chunks), direction)
    np.testing.assert_allclose(found, np.column_stack([local, waiting]))
    assert waiting.any() and local.any()
    lines = AttentionTime(cluster=CLUSTERS["h100"], table=table).timelines(plan)
    compute = getattr(lines, direction).compute
    np.testing.assert_allclose(compute, local + waiting.sum(axis=1))
