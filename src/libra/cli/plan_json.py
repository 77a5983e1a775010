"""A plan's figures as plain values, for `libra plan --json`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.cli.plan_figures import Placed, PlanFigures
from libra.cost.timeline import Timeline
from libra.data.vrsp import imbalance

IntArray = NDArray[np.int64]

KINDS = ("q", "kv", "o")
"""The first axis of `PoolPlan.traffic`."""
BACKWARD_KINDS = ("do", "q", "kv", "dq", "dkv")
"""The first axis of `PoolPlan.backward_traffic`."""


def figures_as_json(figures: PlanFigures) -> dict[str, Any]:
    """All figures as plain values: bytes, seconds, and query-key pairs times heads.

    A setting without a limit is null: JSON has no infinity.
    """
    plan, traffic, placed = figures.plan, figures.traffic, figures.placed
    config = dataclasses.asdict(plan.config).items()
    return {
        "config": {name: None if value == math.inf else value for name, value in config},
        "heads": dataclasses.asdict(plan.heads),
        "cp_size": plan.cp_size,
        "tokens": plan.tokens,
        "workers": plan.workers,
        "tiles": len(plan.assignment),
        "planning_seconds": figures.planning_seconds,
        "imbalance": {"home": imbalance(plan.home_load), "planned": plan.imbalance},
        "bound": {"traffic": figures.bound, "ratio": figures.bound_ratio},
        "placements": [_placed_as_json(p) for p in (placed, *figures.others)],
        "ulysses_refused": figures.ulysses_refused or None,
        "per_worker": {
            "home_load": plan.home_load.tolist(),
            "load": plan.load.tolist(),
            "sent": _by_kind(placed.forward.sent),
            "received": _by_kind(placed.forward.received),
            "backward_sent": _by_kind(placed.backward.sent, BACKWARD_KINDS),
            "backward_received": _by_kind(placed.backward.received, BACKWARD_KINDS),
            "extra_memory": {
                "q": traffic.fetched_q.tolist(),
                "kv": traffic.fetched_kv.tolist(),
                "o": traffic.remote_o.tolist(),
                "total": traffic.extra_memory.tolist(),
            },
            "kept": figures.memory.kept.tolist(),
            "workspace": figures.memory.workspace.tolist(),
            "workspace_without_gradients": figures.memory.workspace_without_gradients.tolist(),
            "segments": traffic.segments.tolist(),
            "launches": traffic.launches.tolist(),
        },
        "traffic": _by_kind(plan.traffic),
        "backward_traffic": _by_kind(plan.backward_traffic, BACKWARD_KINDS),
        "modelled": {
            "time": dataclasses.asdict(figures.model),
            "forward": _timeline_as_json(figures.forward),
            "backward": _timeline_as_json(figures.backward),
        },
    }


def _placed_as_json(placed: Placed) -> dict[str, Any]:
    return {
        "placement": placed.placement,
        "imbalance": placed.imbalance,
        "load": placed.load.tolist(),
        "traffic": _by_kind(placed.forward.by_kind),
        "total_traffic": placed.forward.total,
        "worst_sent": placed.forward.worst_sent,
        "worst_received": placed.forward.worst_received,
        "backward_traffic": _by_kind(placed.backward.by_kind, BACKWARD_KINDS),
        "total_backward_traffic": placed.backward.total,
        "worst_backward_sent": placed.backward.worst_sent,
        "worst_backward_received": placed.backward.worst_received,
    }


def _timeline_as_json(line: Timeline) -> dict[str, Any]:
    return {
        "makespan": line.makespan,
        "compute": line.compute.tolist(),
        "finish": line.finish.tolist(),
        "exposed": line.exposed.tolist(),
    }


def _by_kind(values: IntArray, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    return {kind: value.tolist() for kind, value in zip(kinds, values, strict=True)}
