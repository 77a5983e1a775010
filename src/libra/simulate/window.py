"""One window of one candidate: place its packs, plan its pools, keep the figures."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.data.lengths import causal_pairs, segment_workloads
from libra.data.pools import (
    PackPlacement,
    PoolOrder,
    contiguous_pools,
    distance_to_bound,
    imbalance,
    make_pools,
    pool_loads,
)
from libra.plan.plan_pool import plan_pool
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import held_for_others
from libra.simulate.figures import POOL_FIGURES, Candidate, WindowFigures

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowTask:
    """All that a process needs; arrays are flat, as in `libra.data.packing.Packs`."""

    window: int
    tokens: int
    lengths: IntArray
    offsets: IntArray
    candidate: Candidate
    config: PoolConfig
    """The candidate's, whole."""
    heads: HeadShape
    cp_size: int
    dp_size: int | None
    placement: PackPlacement
    refine: bool
    order: PoolOrder
    measure: Callable[[PoolPlan], Mapping[str, float]] | None

    def digest(self) -> str:
        """Fingerprint of the window's packs."""
        parts = (np.array([self.tokens]), self.offsets - self.offsets[0], self.lengths)
        data = b"".join(part.astype("<i8").tobytes() for part in parts)
        return hashlib.sha256(data).hexdigest()[:16]


def replay_window(task: WindowTask) -> WindowFigures:
    """Place and plan one window as `PoolSampler` and the run time do."""
    weights = segment_workloads(task.lengths, task.offsets)
    size, packs = task.candidate.pool_size, len(weights)
    before = contiguous_pools(packs, size)
    pools = emitted_pools(task, weights)
    found = {name: np.empty(len(pools)) for name in POOL_FIGURES}
    measured: dict[str, FloatArray] = {}
    for k, members in enumerate(pools.tolist()):
        begin = time.perf_counter()
        plan = plan_pool(
            [_bounds(task, pack) for pack in members],
            cp_size=task.cp_size,
            config=task.config,
            heads=task.heads,
            tokens=task.tokens,
        )
        found["planning_seconds"][k] = time.perf_counter() - begin
        for name, value in plan_figures(plan).items():
            found[name][k] = value
        if task.measure is not None:
            for name, value in task.measure(plan).items():
                if name in found:
                    raise ValueError(f"a measure may not call its figure {name!r}: it is taken")
                measured.setdefault(name, np.zeros(len(pools)))[k] = value
    mean = float(weights.mean())
    return WindowFigures(
        window=task.window,
        heaviest_pack=float(weights.max()) / mean if mean else 1.0,
        pools_before=imbalance(pool_loads(weights, before)),
        pools_after=imbalance(pool_loads(weights, pools)),
        pools_above_bound=distance_to_bound(weights, pools),
        steps_before=_steps(_pack_loads(task), task.dp_size or packs),
        steps_after=_steps(
            found["busiest"], (task.dp_size or packs) // size, found["load"] / (size * task.cp_size)
        ),
        pools=found | measured,
    )


def emitted_pools(task: WindowTask, weights: IntArray) -> IntArray:
    """The window's pools in the order of emission, as `PoolSampler` makes them; [pools, P]."""
    size = task.candidate.pool_size
    return make_pools(
        weights,
        size,
        (task.dp_size or len(weights)) // size,
        placement=task.placement,
        refine=task.refine,
        order=task.order,
    )


def plan_figures(plan: PoolPlan) -> dict[str, float]:
    """`POOL_FIGURES` of one plan, planning time excepted."""
    load, home = plan.load, plan.home_load
    traffic = plan.traffic.sum(axis=0)
    node = np.arange(plan.workers) // plan.config.ranks_per_node
    across = np.where(node[:, None] != node, traffic, 0)
    tile_home = np.repeat(plan.geometry.block_worker, plan.head_groups.shards)
    return {
        "workers_before": imbalance(home),
        "workers_after": imbalance(load),
        "load": float(load.sum()),
        "busiest_home": float(home.max()),
        "busiest": float(load.max()),
        "moved_bytes": float(traffic.sum()),
        "across_bytes": float(across.sum()),
        "worst_sent": float(traffic.sum(axis=1).max()),
        "worst_received": float(traffic.sum(axis=0).max()),
        "worst_across": float(max(across.sum(axis=1).max(), across.sum(axis=0).max())),
        "extra_memory": float(held_for_others(plan).max()),
        "tiles": float(len(plan.assignment)),
        "moved_tiles": float(np.count_nonzero(plan.assignment != tile_home)),
    }


def _bounds(task: WindowTask, pack: int) -> IntArray:
    """cu_seqlens of one pack."""
    lengths = task.lengths[task.offsets[pack] : task.offsets[pack + 1]]
    bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _pack_loads(task: WindowTask) -> FloatArray:
    """Query-key pairs of each pack, float64 [packs]."""
    pairs = np.append(0, np.cumsum(causal_pairs(0, task.lengths), dtype=np.float64))
    return np.diff(pairs[task.offsets])


def _steps(busiest: FloatArray, per_index: int, mean: FloatArray | None = None) -> float:
    """Steps imbalance of units in emission order, `per_index` of which share a GA index.

    `busiest` [units]: load of each unit's busiest worker; `mean` of its mean worker, None where
    all its workers are equally busy.
    """
    equal = float((busiest if mean is None else mean).mean())
    slowest = busiest.reshape(-1, per_index).max(axis=1)
    return float(slowest.mean()) / equal - 1.0 if equal else 0.0
