"""One pool's plan with all that `libra plan` shows of it, and other placements of the same pool.

`PlanReport` is the only result: its fields are the keys of `--json`, and the tables and the plot
are views of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.cli.choose_pool import ChosenPool, PoolOrigin
from libra.config import HeadShape, Placement, PoolConfig, ulysses_baseline
from libra.cost.attention_time import AttentionTime, PoolTimelines
from libra.cost.hardware import Cluster
from libra.cost.timeline import Timeline
from libra.data.pools import imbalance
from libra.plan.memory import pool_memory
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.traffic import PoolTraffic
from libra.plan.traffic_bound import traffic_bound

IntArray = NDArray[np.int64]
ByKind = dict[str, IntArray]
"""Bytes by the kind of tensor that they belong to."""

KINDS = ("q", "kv", "o")
"""The first axis of `PoolPlan.traffic`."""
BACKWARD_KINDS = ("do", "q", "kv", "dq", "dkv")
"""The first axis of `PoolPlan.backward_traffic`."""
_TIMED_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementReport:
    """Balance and bytes of one placement; all bytes are sums over workers unless stated."""

    placement: Placement
    imbalance: float
    """max/mean - 1 of the load."""
    load: IntArray
    """Query-key pairs times heads, [workers]."""
    traffic: ByKind
    """Forward, by `KINDS`; each a scalar."""
    total_traffic: int
    worst_sent: int
    """Forward bytes of the worker that sends most."""
    worst_received: int
    backward_traffic: ByKind
    """Backward, by `BACKWARD_KINDS`; each a scalar."""
    total_backward_traffic: int
    worst_backward_sent: int
    worst_backward_received: int

    @property
    def worst(self) -> tuple[int, int, int, int]:
        """Bytes of the busiest worker: sent and received forward, then backward."""
        return (
            *(self.worst_sent, self.worst_received),
            *(self.worst_backward_sent, self.worst_backward_received),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerReport:
    """Figures of each worker, [workers] each; loads in query-key pairs times heads, or bytes."""

    home_load: IntArray
    """Load where every worker computes its own queries."""
    load: IntArray
    sent: ByKind
    received: ByKind
    backward_sent: ByKind
    backward_received: ByKind
    extra_memory: ByKind
    """By `KINDS` and in `total`: see `PoolTraffic.extra_memory`."""
    kept: IntArray
    """See `PoolMemory`, as for the next two."""
    workspace: IntArray
    workspace_without_gradients: IntArray
    segments: IntArray
    """Kernel segments of a pass."""
    launches: IntArray
    """Kernel calls of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImbalanceReport:
    """max/mean - 1 of the load, before and after planning."""

    home: float
    planned: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundReport:
    """Least forward bytes of any placement within the tolerance."""

    traffic: int
    ratio: float | None
    """Forward bytes of this plan over the bound; None where the bound is 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassReport:
    """Modelled seconds of one layer and pass; arrays are [workers]."""

    makespan: float
    compute: NDArray[np.float64]
    finish: NDArray[np.float64]
    exposed: NDArray[np.float64]
    ulysses_compute: float | None
    """Attention of the busiest worker under Ulysses; None where Ulysses was not compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelledReport:
    """Modelled time of one layer."""

    cluster: Cluster
    kernels: str
    """Source of the kernel table."""
    forward: PassReport
    backward: PassReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanReport:
    """A pool's plan: bytes, seconds, and loads in query-key pairs times heads."""

    corpus: PoolOrigin
    config: PoolConfig
    heads: HeadShape
    cp_size: int
    tokens: int
    workers: int
    blocks: int
    tiles: int
    planning_seconds: float
    """From cu_seqlens to a buffer ready to send, compiled code warm, median of a few runs."""
    imbalance: ImbalanceReport
    bound: BoundReport
    placements: list[PlacementReport]
    """This plan's first, then the other placements that the heads allow."""
    ulysses_refused: str | None
    """Why Ulysses is not among the placements; None if it is."""
    per_worker: WorkerReport
    traffic: ByKind
    """Forward bytes from worker i to worker j, [workers, workers] each, by `KINDS`."""
    backward_traffic: ByKind
    """The same backward, by `BACKWARD_KINDS`."""
    modelled: ModelledReport

    @property
    def placed(self) -> PlacementReport:
        """This plan's placement."""
        return self.placements[0]

    @property
    def ulysses(self) -> PlacementReport | None:
        """The baseline; None where the heads don't divide by CP."""
        return next((each for each in self.placements if each.placement == "ulysses"), None)

    def to_json(self) -> str:
        """The fields as JSON; a setting without a limit is null, as JSON has no infinity."""
        # `asdict` copies arrays as they are; json calls `default` for them.
        fields = dataclasses.asdict(self, dict_factory=_without_infinity)
        return json.dumps(fields, default=lambda array: array.tolist())


def report_plan(
    chosen: ChosenPool,
    *,
    tokens: int,
    cp_size: int,
    config: PoolConfig,
    heads: HeadShape,
    attention: AttentionTime,
) -> tuple[PlanReport, PoolTimelines]:
    """Plan a pool, measure the planning, and plan the pool again with the other placements.

    Raises ValueError for what `plan_pool` refuses.
    """
    # Step 1: the plan, and its planning time with compiled code warm.
    make: Callable[..., PoolPlan] = partial(plan_pool, cp_size=cp_size, heads=heads, tokens=tokens)
    plan = make(chosen.cu_seqlens, config=config)
    planning = timeit.repeat(
        lambda: make(chosen.cu_seqlens, config=config).to_buffer(), repeat=_TIMED_RUNS, number=1
    )
    # Step 2: the other placements of the same pool.
    placements = [_placement([plan]), *_other_placements(make, chosen.cu_seqlens, config)]
    ulysses, refused = _ulysses_plans(make, chosen.cu_seqlens, config)
    if ulysses:
        placements.append(_placement(ulysses))

    # Step 3: modelled seconds of this plan, and of Ulysses, whose packs run next to each other.
    lines, bound = attention.timelines(plan), traffic_bound(plan)
    baseline = [attention.timelines(pack) for pack in ulysses]
    report = PlanReport(
        corpus=chosen.origin,
        config=config,
        heads=heads,
        cp_size=cp_size,
        tokens=tokens,
        workers=plan.workers,
        blocks=len(plan.cuts),
        tiles=len(plan.assignment),
        planning_seconds=statistics.median(planning),
        imbalance=ImbalanceReport(home=imbalance(plan.home_load), planned=plan.imbalance),
        bound=BoundReport(
            traffic=bound, ratio=placements[0].total_traffic / bound if bound else None
        ),
        placements=placements,
        ulysses_refused=refused,
        per_worker=_workers(plan, lines.traffic),
        traffic=_by_kind(plan.traffic),
        backward_traffic=_by_kind(plan.backward_traffic),
        modelled=ModelledReport(
            cluster=attention.cluster,
            kernels=attention.table.source,
            forward=_pass(lines.forward, [each.forward for each in baseline]),
            backward=_pass(lines.backward, [each.backward for each in baseline]),
        ),
    )
    return report, lines


def _other_placements(
    make: Callable[..., PoolPlan], cu_seqlens: Sequence[NDArray[np.int32]], config: PoolConfig
) -> list[PlacementReport]:
    """Figures of the same pool with the other placements of tiles."""
    others: tuple[Placement, ...] = ("surplus", "paper")
    return [
        _placement([make(cu_seqlens, config=config.replace(placement=other, speeds="equal"))])
        for other in others
        if other != config.placement
    ]


def _ulysses_plans(
    make: Callable[..., PoolPlan], cu_seqlens: Sequence[NDArray[np.int32]], config: PoolConfig
) -> tuple[list[PoolPlan], str | None]:
    """Ulysses' plan of every pack alone, and the reason where its heads don't divide.

    Ulysses knows no pools, and its bytes do not depend on chunks.  No plans where `config` is
    Ulysses itself.
    """
    if config.placement == "ulysses":
        return [], None
    alone = ulysses_baseline(config)
    try:
        return [make([pack], config=alone) for pack in cu_seqlens], None
    except ValueError as error:
        return [], str(error)


def _placement(plans: Sequence[PoolPlan]) -> PlacementReport:
    """Figures of plans that share a pool's workers between them, in worker order."""
    load = np.concatenate([plan.load for plan in plans])
    # Bytes that each worker sends (the sum over columns) and receives, [kinds, workers] each.
    (sent, received), (back_sent, back_received) = (
        [np.concatenate([moved.sum(axis=axis) for moved in way], axis=1) for axis in (2, 1)]
        for way in ([p.traffic for p in plans], [p.backward_traffic for p in plans])
    )
    return PlacementReport(
        placement=plans[0].config.placement,
        imbalance=imbalance(load),
        load=load,
        traffic=_by_kind(sent.sum(axis=1)),
        total_traffic=int(sent.sum()),
        worst_sent=int(sent.sum(axis=0).max()),
        worst_received=int(received.sum(axis=0).max()),
        backward_traffic=_by_kind(back_sent.sum(axis=1)),
        total_backward_traffic=int(back_sent.sum()),
        worst_backward_sent=int(back_sent.sum(axis=0).max()),
        worst_backward_received=int(back_received.sum(axis=0).max()),
    )


def _workers(plan: PoolPlan, traffic: PoolTraffic) -> WorkerReport:
    # Traffic is [kinds, sender, receiver]; the sum over receivers is the bytes that a worker sends.
    memory = pool_memory(plan)
    return WorkerReport(
        home_load=plan.home_load,
        load=plan.load,
        sent=_by_kind(plan.traffic.sum(axis=2)),
        received=_by_kind(plan.traffic.sum(axis=1)),
        backward_sent=_by_kind(plan.backward_traffic.sum(axis=2)),
        backward_received=_by_kind(plan.backward_traffic.sum(axis=1)),
        extra_memory={
            "q": traffic.fetched_q,
            "kv": traffic.fetched_kv,
            "o": traffic.peer_out,
            "total": traffic.extra_memory,
        },
        kept=memory.kept,
        workspace=memory.workspace,
        workspace_without_gradients=memory.workspace_without_gradients,
        segments=traffic.segments,
        launches=traffic.calls,
    )


def _pass(line: Timeline, ulysses: Sequence[Timeline]) -> PassReport:
    """A pass of the plan next to those of Ulysses, one for each pack."""
    return PassReport(
        makespan=line.makespan,
        compute=line.compute,
        finish=line.finish,
        exposed=line.exposed,
        ulysses_compute=max((float(pack.compute.max()) for pack in ulysses), default=None),
    )


def _by_kind(values: IntArray) -> ByKind:
    """`values` [kinds, ...] by the names of the kinds, forward or backward by their number."""
    kinds = KINDS if len(values) == len(KINDS) else BACKWARD_KINDS
    return dict(zip(kinds, values, strict=True))


def _without_infinity(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and math.isinf(v) else v for key, v in fields}
