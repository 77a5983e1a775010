"""Plans made on the planner thread."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import libra
from libra.runtime import planner_thread
from libra.runtime.planner_thread import Planner, lengths_digest
from libra.runtime.process_groups import Membership

CONFIG = libra.PoolConfig(pool_size=1, chunks=1)
HEADS = libra.HeadShape(2, 1, 4, 8)
BOUNDS = (np.array([0, 3, 16]),)


def make_planner() -> Planner:
    world = dist.group.WORLD
    assert world is not None
    return Planner(world, Membership(((0,),), 0, 0, 1), CONFIG)


@pytest.fixture
def planner(mesh: DeviceMesh) -> Iterator[Planner]:
    planner = make_planner()
    yield planner
    planner.shutdown()


def test_the_plan_is_that_of_plan_pool(planner: Planner) -> None:
    planned = planner.submit(BOUNDS, 16, HEADS).result()
    right = libra.plan_pool(BOUNDS, cp_size=1, config=CONFIG, heads=HEADS)
    assert planned.plan.digest() == right.digest()
    assert planned.rank_plan.worker == 0
    assert planner.submitted == 1


def test_an_error_is_raised_where_the_plan_is_asked_for(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise MemoryError("no room for a plan")

    monkeypatch.setattr(planner_thread, "plan_pool", no_room)
    future = planner.submit(BOUNDS, 16, HEADS)
    with pytest.raises(ValueError, match="worker 0: no room for a plan"):
        future.result()


def test_jobs_count_up_to_those_of_other_ranks(planner: Planner) -> None:
    planner.catch_up(3)
    planner.catch_up(2)
    assert planner.submitted == 3


def test_a_plan_is_logged_once_it_is_ready(
    planner: Planner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "libra"):
        planner.submit(BOUNDS, 16, HEADS).result()
    (record,) = caplog.records
    assert "plan of 1 workers ready in" in record.message and "imbalance 0.00%" in record.message


def test_a_closed_planner_finishes_its_jobs_and_takes_no_more(mesh: DeviceMesh) -> None:
    planner = make_planner()
    future = planner.submit(BOUNDS, 16, HEADS)
    planner.shutdown()
    planner.shutdown()
    assert future.done()
    with pytest.raises(ValueError, match="the pool is closed"):
        planner.submit(BOUNDS, 16, HEADS)


def test_a_forgotten_planner_ends_its_thread(mesh: DeviceMesh) -> None:
    planner = make_planner()
    planner.submit(BOUNDS, 16, HEADS).result()
    thread, left = planner._thread, weakref.ref(planner)
    del planner
    gc.collect()
    thread.join(5.0)
    assert left() is None and not thread.is_alive()


def test_digests_tell_bounds_apart() -> None:
    bounds = [np.array([0, 2]), np.array([0, 1, 2])]
    assert lengths_digest(bounds) == lengths_digest([each.copy() for each in bounds])
    assert lengths_digest(bounds) != lengths_digest(bounds[::-1])
    assert 0 <= lengths_digest(bounds) < 2**63
