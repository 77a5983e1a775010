"""One window of one candidate: pools as in training, figures as in the plans."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from libra.cost.attention_time import AttentionCost
from libra.data.pools import PackPlacement
from libra.data.sampler import PoolSampler
from libra.simulate.replay_window import (
    WindowReplay,
    WindowTask,
    pool_figures,
    replay_window,
)
from libra.simulate.results import Candidate
from libra.simulate.schemes import SCHEMES
from tests.pools import SmallPool, small_pools
from tests.unit.simulate.small_cluster import REPLAYED, WINDOWS, make_setting

NOTHING = AttentionCost(**dict.fromkeys((f.name for f in dataclasses.fields(AttentionCost)), 0.0))


@pytest.mark.parametrize(
    "placement, refine, order",
    [
        ("vrsp", True, "grouped"),
        ("vrsp", True, "uniform"),
        ("vrsp", False, "index"),
        ("contiguous", False, "index"),
    ],
)
def test_pools_are_those_of_the_sampler(placement: PackPlacement, refine: bool, order: str) -> None:
    schedule = PoolSampler(
        REPLAYED,
        global_batch=16,
        dp_rank=0,
        dp_size=8,
        pool_size=2,
        shuffle=False,
        placement=placement,
        refine=refine,
        order=order,  # type: ignore[arg-type]
    ).schedule()
    scheme = replace(
        SCHEMES["libra"],
        pack_placement=placement,
        refine=refine,
        order=order,  # type: ignore[arg-type]
    )
    found = [
        scheme.pools(window.workloads, 2, 4).reshape(2, 8) + 16 * i
        for i, window in enumerate(WINDOWS)
    ]
    assert np.concatenate(found).tolist() == schedule.tolist()


@given(small_pools(placements=("surplus", "paper", "ulysses")))
@settings(max_examples=60, deadline=None)
def test_loads_and_bytes_are_the_plans_own(pool: SmallPool) -> None:
    plan = pool.plan()
    figures = pool_figures(plan, NOTHING, planning_seconds=0.0)
    assert figures.load == plan.load.sum() and figures.busiest == plan.load.max()
    assert figures.moved_bytes == plan.traffic.sum()
    assert figures.across_bytes <= figures.moved_bytes


def test_a_window_survives_json_exactly() -> None:
    task = WindowTask(
        window=1,
        packs=WINDOWS[1],
        candidate=Candidate(4, 256, 2),
        setting=make_setting(),
    )
    found = replay_window(task)
    assert WindowReplay.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_candidates_read_well() -> None:
    assert str(Candidate(8, 4096, 2)) == "P=8 B=4096 H=2"
    assert dataclasses.astuple(Candidate(8, 4096, 2)) == (8, 4096, 2)
