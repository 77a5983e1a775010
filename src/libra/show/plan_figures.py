"""The figures of one pool's plan, beside what other placements make of the same pool."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import HeadShape, Placement, PoolConfig
from libra.placement import imbalance
from libra.plan.plan import PoolPlan, plan_pool
from libra.plan.tally import PoolTally, pool_tally
from libra.plan.timeline import Timeline, TimeModel, pool_timeline

IntArray = NDArray[np.int64]

KINDS = ("q", "kv", "o")
"""The first axis of `PoolPlan.traffic`."""
_TIMED_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """What one placement makes of the pool."""

    placement: Placement
    load: IntArray
    """Query-key pairs times heads, [workers]."""
    sent: IntArray
    """Forward bytes by kind (Q, K with V, O) and worker, [3, workers]."""
    received: IntArray
    """The same as received."""

    @property
    def imbalance(self) -> float:
        """max/mean - 1 of the load."""
        return imbalance(self.load)

    @property
    def traffic(self) -> IntArray:
        """Forward bytes of all workers by kind, [3]."""
        return np.asarray(self.sent.sum(axis=1))

    @property
    def worst_sent(self) -> int:
        """Bytes of the worker that sends most."""
        return int(self.sent.sum(axis=0).max())

    @property
    def worst_received(self) -> int:
        """Bytes of the worker that receives most."""
        return int(self.received.sum(axis=0).max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFigures:
    """A plan with all that is shown of it."""

    plan: PoolPlan
    planning_seconds: float
    """From cu_seqlens to a buffer ready to send, compiled code warm, median of a few runs."""
    tally: PoolTally
    model: TimeModel
    timeline: Timeline
    placed: Placed
    others: tuple[Placed, ...]
    """The other placements, those that the heads allow."""
    ulysses_refused: str = ""
    """Why Ulysses is not among them; empty if it is."""

    @property
    def ulysses(self) -> Placed | None:
        """The baseline's figures; None where the heads don't divide by CP."""
        found = [p for p in (self.placed, *self.others) if p.placement == "ulysses"]
        return found[0] if found else None


def plan_figures(
    cu_seqlens: Sequence[ArrayLike],
    *,
    tokens: int,
    cp_size: int,
    config: PoolConfig,
    heads: HeadShape,
    model: TimeModel,
) -> PlanFigures:
    """Plan a pool, time the planning, and plan it again with the other placements.

    Raises ValueError for what `plan_pool` refuses.
    """

    def make(config: PoolConfig, cu_seqlens: Sequence[ArrayLike]) -> PoolPlan:
        return plan_pool(cu_seqlens, cp_size=cp_size, config=config, heads=heads, tokens=tokens)

    plan = make(config, cu_seqlens)
    seconds = []
    for _ in range(_TIMED_RUNS):
        begin = time.perf_counter()
        make(config, cu_seqlens).to_buffer()
        seconds.append(time.perf_counter() - begin)
    tally = pool_tally(plan)
    others = []
    for placement in ("surplus", "paper"):
        if placement != config.placement:
            others.append(_placed([make(config.replace(placement=placement), cu_seqlens)]))
    refused = ""
    if config.placement != "ulysses":
        # Ulysses knows no pools: every pack alone, and chunks play no part in what travels.
        alone = config.replace(placement="ulysses", pool_size=1, chunks=1)
        try:
            others.append(_placed([make(alone, [cu]) for cu in cu_seqlens]))
        except ValueError as error:
            refused = str(error)
    return PlanFigures(
        plan=plan,
        planning_seconds=statistics.median(seconds),
        tally=tally,
        model=model,
        timeline=pool_timeline(tally, heads, model),
        placed=_placed([plan]),
        others=tuple(others),
        ulysses_refused=refused,
    )


def _placed(plans: Sequence[PoolPlan]) -> Placed:
    """Figures of plans that share a pool's workers between them, in worker order."""
    return Placed(
        placement=plans[0].config.placement,
        load=np.concatenate([plan.load for plan in plans]),
        sent=np.concatenate([plan.traffic.sum(axis=2) for plan in plans], axis=1),
        received=np.concatenate([plan.traffic.sum(axis=1) for plan in plans], axis=1),
    )


def figures_as_json(figures: PlanFigures) -> dict[str, Any]:
    """All figures as plain values: bytes, seconds, and query-key pairs times heads."""
    plan, tally, line = figures.plan, figures.tally, figures.timeline
    return {
        "config": dataclasses.asdict(plan.config),
        "heads": dataclasses.asdict(plan.heads),
        "cp_size": plan.cp_size,
        "tokens": plan.tokens,
        "workers": plan.workers,
        "tiles": len(plan.assignment),
        "planning_seconds": figures.planning_seconds,
        "imbalance": {"home": imbalance(plan.home_load), "planned": plan.imbalance},
        "placements": [_placed_as_json(p) for p in (figures.placed, *figures.others)],
        "ulysses_refused": figures.ulysses_refused or None,
        "per_worker": {
            "home_load": plan.home_load.tolist(),
            "load": plan.load.tolist(),
            "sent": _by_kind(figures.placed.sent),
            "received": _by_kind(figures.placed.received),
            "extra_memory": {
                "q": tally.fetched_q.tolist(),
                "kv": tally.fetched_kv.tolist(),
                "o": tally.remote_o.tolist(),
                "total": tally.extra_memory.tolist(),
            },
            "segments": tally.segments.tolist(),
            "launches": tally.launches.tolist(),
        },
        "traffic": _by_kind(plan.traffic),
        "modelled": {
            "time": dataclasses.asdict(figures.model),
            "makespan": line.makespan,
            "compute": line.compute.tolist(),
            "finish": line.finish.tolist(),
            "exposed": line.exposed.tolist(),
        },
    }


def _placed_as_json(placed: Placed) -> dict[str, Any]:
    return {
        "placement": placed.placement,
        "imbalance": placed.imbalance,
        "load": placed.load.tolist(),
        "traffic": _by_kind(placed.traffic),
        "total_traffic": int(placed.traffic.sum()),
        "worst_sent": placed.worst_sent,
        "worst_received": placed.worst_received,
    }


def _by_kind(values: IntArray) -> dict[str, Any]:
    return {kind: value.tolist() for kind, value in zip(KINDS, values, strict=True)}
