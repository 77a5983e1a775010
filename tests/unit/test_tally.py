"""Counts per chunk add up to the plan's own figures, and to what the executor allocates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings

from libra.plan.route import worker_route
from libra.plan.tally import pool_tally
from tests.pools import SmallPool, small_pools

EVERY = small_pools(placements=("surplus", "paper", "ulysses"))


@given(EVERY)
@settings(max_examples=25)
def test_chunks_add_up_to_the_loads_and_the_traffic_of_the_plan(pool: SmallPool) -> None:
    plan = pool.plan()
    tally = pool_tally(plan)
    assert (tally.local_pairs + tally.pairs.sum(axis=1) == plan.load).all()
    assert (tally.dispatched.sum(axis=0) == plan.traffic[0] + plan.traffic[1]).all()
    assert (tally.returned.sum(axis=0) == plan.traffic[2]).all()
    assert (tally.returned == tally.returned[:1]).all()  # every chunk the same share of Q and O
    for moved in (*tally.dispatched, *tally.returned):
        assert not np.diagonal(moved).any()


@given(EVERY)
@settings(max_examples=25)
def test_extra_memory_is_what_the_executor_allocates(pool: SmallPool) -> None:
    from libra.runtime.buffers import fetched_size, outputs_size

    plan = pool.plan()
    tally = pool_tally(plan)
    for worker in range(plan.workers):
        route = worker_route(plan, worker)
        program: Any = SimpleNamespace(
            heads=plan.heads, route=route, q=route.q, assembly=route.assembly
        )
        elements = fetched_size(program) + outputs_size(program)
        assert tally.extra_memory[worker] == elements * plan.heads.bytes
        assert tally.segments[worker] == sum(len(launch.segments) for launch in route.launches)
        assert tally.launches[worker] == len(route.launches)
