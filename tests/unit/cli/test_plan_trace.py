"""The trace file: keys that viewers require, threads without overlaps, figures of the plan."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from libra.cli.plan_trace import COMPUTE, NETWORK, plan_trace
from libra.config import BackwardMode, HeadShape, PoolConfig
from libra.cost import CLUSTERS, AttentionTime, published_table
from libra.plan.plan_pool import PoolPlan, plan_pool


@pytest.fixture(scope="module")
def plan() -> PoolPlan:
    return plan_pool(
        [[0, 4096], [0, 512, 1024, 2048, 4096]],
        cp_size=2,
        config=PoolConfig(pool_size=2, chunks=2),
        heads=HeadShape(q=8, kv=4, dim=64),
    )


@pytest.fixture(scope="module")
def trace(plan: PoolPlan) -> dict[str, Any]:
    return json.loads(json.dumps(make_trace(plan)))


def make_trace(plan: PoolPlan) -> dict[str, Any]:
    cluster = CLUSTERS["h100"]
    lines = AttentionTime(cluster=cluster, table=published_table(cluster)).timelines(plan)
    return plan_trace(lines, cp_size=plan.cp_size, about={"pool": "a test"})


def complete(trace: dict[str, Any], *categories: str) -> list[dict[str, Any]]:
    """Events with a length that are of all these categories."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in events if {*categories} <= {*event["cat"].split(",")}]


def test_every_event_has_the_keys_that_viewers_require(trace: dict[str, Any]) -> None:
    assert trace["displayTimeUnit"] == "ms"
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["args"], dict)
    for event in complete(trace):
        kind, direction = event["cat"].split(",")
        assert kind in ("dispatch", "attend", "return")
        assert direction in ("forward", "backward")
        assert event["ts"] >= 0
        assert event["dur"] > 0


def test_a_worker_is_a_process_with_a_compute_and_a_network_thread(
    trace: dict[str, Any], plan: PoolPlan
) -> None:
    named = [e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    found = {(e["pid"], e["tid"], e["args"]["name"]) for e in named}
    assert found == {
        (worker, thread, name)
        for worker in range(plan.workers)
        for thread, name in ((COMPUTE, "compute"), (NETWORK, "network"))
    }
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names[3] == "worker 3 (replica 1, rank 1)"
    for event in complete(trace):
        assert event["tid"] == (COMPUTE if "attend" in event["cat"] else NETWORK)


def test_events_of_a_thread_do_not_overlap(trace: dict[str, Any]) -> None:
    threads = defaultdict(list)
    for event in complete(trace):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for events in threads.values():
        events.sort()
        for (_, end), (start, _) in pairwise(events):
            assert start >= end - 1e-6  # a picosecond, for sums of decimals


def test_backward_follows_when_all_workers_have_finished_forward(trace: dict[str, Any]) -> None:
    ends = [event["ts"] + event["dur"] for event in complete(trace, "forward")]
    starts = [event["ts"] for event in complete(trace, "backward")]
    assert min(starts) == pytest.approx(max(ends))


@pytest.mark.parametrize("backward", ["retain", "refetch"])
def test_arguments_add_up_to_the_plan(plan: PoolPlan, backward: BackwardMode) -> None:
    plan = dataclasses.replace(plan, config=plan.config.replace(backward=backward))
    trace = make_trace(plan)

    def total(name: str, *categories: str) -> int:
        return sum(event["args"][name] for event in complete(trace, *categories))

    dout, again_q, again_kv, dq, dkv = plan.backward_traffic.sum(axis=(1, 2))
    for direction in ("forward", "backward"):
        assert total("pairs", "attend", direction) == plan.load.sum()
    for name in ("bytes_sent", "bytes_received"):
        assert total(name, "dispatch", "forward") == plan.traffic[:2].sum() > 0
        assert total(name, "return", "forward") == plan.traffic[2].sum() > 0
        assert total(name, "dispatch", "backward") == dout + again_q + again_kv > 0
        assert total(name, "return", "backward") == dq + dkv > 0


def test_names_say_the_pass_and_the_chunk(trace: dict[str, Any]) -> None:
    names = {event["name"] for event in complete(trace, "forward")}
    assert {"attend local", "dispatch 0", "dispatch 1", "return 1", "attend 1"} <= names
    assert {event["name"] for event in complete(trace, "backward")} == {
        f"backward {name}" for name in names
    }
    chunks = {(e["name"], e["args"]["chunk"]) for e in complete(trace, "return", "forward")}
    assert chunks == {("return 0", 0), ("return 1", 1)}


def test_a_pool_that_moves_nothing_has_work_and_no_exchanges() -> None:
    plan = plan_pool(
        [[0, 64]],
        cp_size=1,
        config=PoolConfig(pool_size=1, chunks=1),
        heads=HeadShape(q=2, kv=1, dim=8),
    )
    events = complete(make_trace(plan))
    assert [event["name"] for event in events] == ["attend local", "backward attend local"]
