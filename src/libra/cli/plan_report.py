"""One pool's plan with all that `libra plan` shows of it, and other placements of the same pool.

`PlanReport` is the only result: the tables, the plot, the trace and `--json` are views of it.
"""

from __future__ import annotations

import json
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from libra.cli.choose_pool import ChosenPool, PoolOrigin
from libra.config import HeadShape, Placement, PoolConfig, ulysses_baseline
from libra.cost.attention_time import AttentionTime, PoolTimelines
from libra.cost.kernel_table import DIRECTIONS, Direction
from libra.data.lengths import IntArray
from libra.data.pools import imbalance
from libra.plan.memory import PoolMemory, pool_memory
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.traffic_bound import traffic_bound
from libra.simulate.results import plain_json

KINDS = ("q", "kv", "o")
"""The first axis of `PoolPlan.traffic`."""
BACKWARD_KINDS = ("do", "q", "kv", "dq", "dkv")
"""The first axis of `PoolPlan.backward_traffic`."""
_TIMED_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassBytes:
    """Bytes that a placement moves in one pass."""

    kinds: IntArray
    """Of all workers, by `KINDS` or `BACKWARD_KINDS`."""
    sent: int
    """Bytes of the worker that sends most."""
    received: int
    """Bytes of the worker that receives most."""

    @property
    def total(self) -> int:
        """Bytes of all kinds and workers."""
        return int(self.kinds.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementReport:
    """Balance and bytes of one placement."""

    placement: Placement
    load: IntArray
    """Query-key pairs times heads, [workers]."""
    forward: PassBytes
    backward: PassBytes

    @property
    def imbalance(self) -> float:
        """max/mean - 1 of the load."""
        return imbalance(self.load)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanReport:
    """A pool's plan, what it was made of, and what it is compared with."""

    origin: PoolOrigin
    plan: PoolPlan
    memory: PoolMemory
    planning_seconds: float
    """From cu_seqlens to a buffer ready to send, compiled code warm, median of a few runs."""
    bound: int
    """Least forward bytes of any placement within the tolerance."""
    placements: list[PlacementReport]
    """This plan's first, then the other placements that the heads allow."""
    ulysses_refused: str | None
    """Why Ulysses is not among the placements; None if it is."""
    attention: AttentionTime
    """The model of the seconds."""
    lines: PoolTimelines
    """Both passes of one layer."""
    ulysses_lines: list[PoolTimelines]
    """The same of each pack under Ulysses; empty where Ulysses was not compared."""

    @property
    def placed(self) -> PlacementReport:
        """This plan's placement."""
        return self.placements[0]

    @property
    def ulysses(self) -> PlacementReport | None:
        """The baseline; None where the heads don't divide by CP."""
        return next((each for each in self.placements if each.placement == "ulysses"), None)

    @property
    def bound_ratio(self) -> float | None:
        """Forward bytes of this plan over the bound; None where the bound is 0."""
        return self.placed.forward.total / self.bound if self.bound else None

    def ulysses_compute(self, direction: Direction) -> float | None:
        """Seconds of the busiest worker under Ulysses; None where Ulysses was not compared."""
        # Packs run next to each other, each on its own replica.
        packs = [getattr(each, direction).compute.max() for each in self.ulysses_lines]
        return float(max(packs)) if packs else None

    def to_json(self) -> str:
        """The figures as JSON; a setting without a limit is null, as JSON has no infinity."""
        return json.dumps(_figures(self), default=_plain)


def report_plan(
    chosen: ChosenPool,
    *,
    tokens: int,
    cp_size: int,
    config: PoolConfig,
    heads: HeadShape,
    attention: AttentionTime,
) -> PlanReport:
    """Plan a pool, measure the planning, and plan the pool again with the other placements.

    Raises ValueError for what `plan_pool` refuses.
    """
    # Step 1: the plan, and its planning time with compiled code warm.
    make: Callable[..., PoolPlan] = partial(plan_pool, cp_size=cp_size, heads=heads, tokens=tokens)
    plan = make(chosen.cu_seqlens, config=config)
    planning = timeit.repeat(
        lambda: make(chosen.cu_seqlens, config=config).to_buffer(), repeat=_TIMED_RUNS, number=1
    )
    # Step 2: the same pool with the other placements, whose targets are equal.
    others = [
        config.replace(placement=other, speeds="equal")
        for other in ("surplus", "paper")
        if other != config.placement
    ]
    plans = [[plan], *([make(chosen.cu_seqlens, config=other)] for other in others)]
    # Step 3: Ulysses, which knows no pools: every pack alone.  Its bytes do not depend on chunks.
    ulysses: list[PoolPlan] = []
    refused = None
    if config.placement != "ulysses":
        alone = ulysses_baseline(config)
        try:
            ulysses = [make([pack], config=alone) for pack in chosen.cu_seqlens]
            plans.append(ulysses)
        except ValueError as error:  # its heads don't divide
            refused = str(error)
    return PlanReport(
        origin=chosen.origin,
        plan=plan,
        memory=pool_memory(plan),
        planning_seconds=statistics.median(planning),
        bound=traffic_bound(plan),
        placements=[_placement(each) for each in plans],
        ulysses_refused=refused,
        attention=attention,
        lines=attention.timelines(plan),
        ulysses_lines=[attention.timelines(pack) for pack in ulysses],
    )


def _placement(plans: Sequence[PoolPlan]) -> PlacementReport:
    """Figures of plans that share a pool's workers between them, in worker order."""
    return PlacementReport(
        placement=plans[0].config.placement,
        load=np.concatenate([plan.load for plan in plans]),
        forward=_pass_bytes([plan.traffic for plan in plans]),
        backward=_pass_bytes([plan.backward_traffic for plan in plans]),
    )


def _pass_bytes(moved: Sequence[IntArray]) -> PassBytes:
    """Of bytes from worker to worker, [kinds, workers, workers] for each plan."""
    # A worker's row is what it sends, its column what it receives.
    sent, received = (
        np.concatenate([each.sum(axis=axis) for each in moved], axis=1) for axis in (2, 1)
    )
    return PassBytes(
        kinds=sent.sum(axis=1),
        sent=int(sent.sum(axis=0).max()),
        received=int(received.sum(axis=0).max()),
    )


def _figures(report: PlanReport) -> dict[str, Any]:
    """Everything by the keys of `--json`: loads are query-key pairs times heads, bytes and seconds
    are of one layer.
    """
    plan = report.plan
    return {
        "corpus": report.origin,
        "config": plan.config,
        "heads": plan.heads,
        "cp_size": plan.cp_size,
        "tokens": plan.tokens,
        "workers": plan.workers,
        "blocks": len(plan.geometry.block_start),
        "tiles": len(plan.assignment),
        "planning_seconds": report.planning_seconds,
        "imbalance": {"home": imbalance(plan.home_load), "planned": plan.imbalance},
        "bound": {"traffic": report.bound, "ratio": report.bound_ratio},
        "placements": [_placement_figures(each) for each in report.placements],
        "ulysses_refused": report.ulysses_refused,
        "per_worker": _worker_figures(report),
        # Bytes from worker i to worker j, [workers, workers] for each kind.
        "traffic": _by_kind(plan.traffic),
        "backward_traffic": _by_kind(plan.backward_traffic),
        "modelled": {
            "cluster": report.attention.cluster,
            "kernels": report.attention.table.source,
            **{direction: _pass_figures(report, direction) for direction in DIRECTIONS},
        },
    }


def _placement_figures(placed: PlacementReport) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: getattr(placed, name) for name in ("placement", "imbalance", "load")
    }
    # The same keys twice: traffic and backward_traffic, worst_sent and worst_backward_sent.
    for word, moved in (("", placed.forward), ("backward_", placed.backward)):
        figures |= {
            f"{word}traffic": _by_kind(moved.kinds),
            f"total_{word}traffic": moved.total,
            f"worst_{word}sent": moved.sent,
            f"worst_{word}received": moved.received,
        }
    return figures


def _worker_figures(report: PlanReport) -> dict[str, Any]:
    """Figures of each worker, [workers] each."""
    plan, traffic = report.plan, report.lines.traffic
    # Bytes from worker to worker are [kinds, sender, receiver]: over axis 2 lies what one sends.
    return {
        "home_load": plan.home_load,
        "load": plan.load,
        "sent": _by_kind(plan.traffic.sum(axis=2)),
        "received": _by_kind(plan.traffic.sum(axis=1)),
        "backward_sent": _by_kind(plan.backward_traffic.sum(axis=2)),
        "backward_received": _by_kind(plan.backward_traffic.sum(axis=1)),
        "extra_memory": {
            **_by_kind(np.stack([traffic.fetched_q, traffic.fetched_kv, traffic.peer_out])),
            "total": traffic.extra_memory,
        },
        **asdict(report.memory),  # kept, workspace and workspace_without_gradients
        "segments": traffic.segments,
        "launches": traffic.calls,
    }


def _pass_figures(report: PlanReport, direction: Direction) -> dict[str, Any]:
    """Modelled seconds of a pass; arrays are [workers]."""
    line = getattr(report.lines, direction)
    figures = {name: getattr(line, name) for name in ("makespan", "compute", "finish", "exposed")}
    return figures | {"ulysses_compute": report.ulysses_compute(direction)}


def _by_kind(values: IntArray) -> Mapping[str, IntArray]:
    """`values` [kinds, ...] by the names of the kinds, forward or backward by their number."""
    kinds = KINDS if len(values) == len(KINDS) else BACKWARD_KINDS
    return dict(zip(kinds, values, strict=True))


def _plain(value: Any) -> Any:
    """For what JSON does not know: lists for arrays, keys for dataclasses."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return plain_json(asdict(value))
