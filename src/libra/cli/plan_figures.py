"""The figures of one pool's plan, beside what other placements make of the same pool."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import HeadShape, Placement, PoolConfig, ulysses_beside
from libra.cost.timeline import Timeline, TimeModel, pool_timeline
from libra.data.vrsp import imbalance
from libra.plan.memory import PoolMemory, pool_memory
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.traffic import PoolTraffic, pool_traffic
from libra.plan.traffic_bound import traffic_bound

IntArray = NDArray[np.int64]

_TIMED_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moved:
    """What the workers of a pool send and receive in one pass."""

    sent: IntArray
    """Bytes by kind and worker, [kinds, workers]."""
    received: IntArray
    """The same as received."""

    @property
    def by_kind(self) -> IntArray:
        """Bytes of all workers, [kinds]."""
        return np.asarray(self.sent.sum(axis=1))

    @property
    def total(self) -> int:
        """Bytes of all workers and kinds."""
        return int(self.sent.sum())

    @property
    def worst_sent(self) -> int:
        """Bytes of the worker that sends most."""
        return int(self.sent.sum(axis=0).max())

    @property
    def worst_received(self) -> int:
        """Bytes of the worker that receives most."""
        return int(self.received.sum(axis=0).max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """What one placement makes of the pool."""

    placement: Placement
    load: IntArray
    """Query-key pairs times heads, [workers]."""
    forward: Moved
    """By kind: Q, K with V, O."""
    backward: Moved
    """By kind: dO, Q and K with V where they are fetched again, dQ, dK with dV."""

    @property
    def imbalance(self) -> float:
        """max/mean - 1 of the load."""
        return imbalance(self.load)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFigures:
    """A plan with all that is shown of it."""

    plan: PoolPlan
    planning_seconds: float
    """From cu_seqlens to a buffer ready to send, compiled code warm, median of a few runs."""
    traffic: PoolTraffic
    memory: PoolMemory
    model: TimeModel
    forward: Timeline
    backward: Timeline
    bound: int
    """Forward bytes that a placement within the tolerance moves at least."""
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

    @property
    def bound_ratio(self) -> float | None:
        """Forward traffic over the bound; None where the bound is 0."""
        return self.placed.forward.total / self.bound if self.bound else None


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
    traffic = pool_traffic(plan)
    others = []
    for placement in ("surplus", "paper"):
        if placement != config.placement:
            others.append(
                _placed([make(config.replace(placement=placement, speeds="equal"), cu_seqlens)])
            )
    refused = ""
    if config.placement != "ulysses":
        # Ulysses knows no pools: every pack alone, and chunks play no part in what travels.
        alone = ulysses_beside(config)
        try:
            others.append(_placed([make(alone, [cu]) for cu in cu_seqlens]))
        except ValueError as error:
            refused = str(error)
    return PlanFigures(
        plan=plan,
        planning_seconds=statistics.median(seconds),
        traffic=traffic,
        memory=pool_memory(plan),
        model=model,
        forward=pool_timeline(traffic, heads, model),
        backward=pool_timeline(traffic, heads, model, direction="backward"),
        bound=traffic_bound(plan),
        placed=_placed([plan]),
        others=tuple(others),
        ulysses_refused=refused,
    )


def _placed(plans: Sequence[PoolPlan]) -> Placed:
    """Figures of plans that share a pool's workers between them, in worker order."""
    return Placed(
        placement=plans[0].config.placement,
        load=np.concatenate([plan.load for plan in plans]),
        forward=_moved([plan.traffic for plan in plans]),
        backward=_moved([plan.backward_traffic for plan in plans]),
    )


def _moved(traffic: Sequence[IntArray]) -> Moved:
    return Moved(
        sent=np.concatenate([moved.sum(axis=2) for moved in traffic], axis=1),
        received=np.concatenate([moved.sum(axis=1) for moved in traffic], axis=1),
    )
