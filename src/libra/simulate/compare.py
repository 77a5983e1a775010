"""The parts of a study that compare schemes: a few windows, every way to balance them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from libra.cost.pipeline import ScheduleName
from libra.data.packing import Packs
from libra.data.pools import deal_pools
from libra.plan.plan_pool import plan_pool
from libra.simulate.scaling import fixed_batch, weak
from libra.simulate.schemes import (
    SCHEMES,
    SchemeFigures,
    Setting,
    ideal_figures,
    scheme_figures,
)

_SCHEDULES: Final[tuple[ScheduleName, ...]] = ("gpipe", "1f1b", "interleaved")
_STAGES: Final = (2, 4, 8)

Progress = Callable[[str, int, int | None], None]
"""Told the stage, what is done of it, and how much there is, if known."""


def compare_schemes(
    windows: Sequence[Packs], setting: Setting, progress: Progress
) -> dict[str, list[SchemeFigures]]:
    """Figures of every scheme in every window; schemes that can't be planned are missing."""
    found: dict[str, list[SchemeFigures]] = {}
    total = len(SCHEMES) * len(windows)
    for i, (scheme, n) in enumerate((s, n) for s in SCHEMES for n in range(len(windows))):
        progress("comparing schemes", i, total)
        figures: SchemeFigures | None
        if scheme == "ideal":  # follows from Ulysses, which comes first
            figures = ideal_figures(found["ulysses"][n], windows[n].tokens, setting)
        else:
            figures = scheme_figures(windows[n], setting, scheme)
        if figures is not None:
            found.setdefault(scheme, []).append(figures)
    progress("comparing schemes", total, total)
    return found


def scheme_rows(schemes: dict[str, list[SchemeFigures]], setting: Setting) -> list[dict[str, Any]]:
    """Step times, split: attention that the slowest pool computes, what else it waits for in
    attention, and all that is not attention.
    """
    layers = setting.parallelism.chunk_layers(setting.model) * setting.parallelism.virtual_stages
    recomputed = setting.parallelism.recompute == "full"
    rows: list[dict[str, Any]] = []
    for key, windows in schemes.items():
        steps, attention, compute, index = [], [], [], []
        for figures in windows:
            spread = setting.parallelism
            forward = figures.replicas(figures.forward, spread)
            backward = figures.replicas(figures.backward, spread)
            busiest = figures.replicas(figures.compute, spread)
            again = forward if recomputed else 0.0
            spent = (forward + backward + again).sum(axis=0)
            slowest = int(spent.argmax())
            steps.append(figures.step(setting).seconds)
            attention.append(layers * float(spent[slowest]))
            share = busiest.sum(axis=0)[slowest] / (forward + backward).sum(axis=0)[slowest]
            compute.append(attention[-1] * float(share))
            index.append((forward + backward).max(axis=1))
        step, spent_mean, computed = np.mean(steps), np.mean(attention), np.mean(compute)
        rows.append(
            {
                "key": key,
                "label": SCHEMES[key],
                "step_seconds": float(step),
                "attention_seconds": float(computed),
                "exposed_seconds": max(0.0, float(spent_mean - computed)),
                "other_seconds": float(step - spent_mean),
                "worst_index": float(np.mean([each.max() for each in index])),
                "mean_index": float(np.mean([each.mean() for each in index])),
            }
        )
    base = rows[0]["step_seconds"]
    return [{**row, "speedup": base / row["step_seconds"]} for row in rows]


def scaling_rows(
    packs: Packs,
    known: Mapping[str, SchemeFigures],
    setting: Setting,
    progress: Progress,
    *,
    most: int,
    seed: int,
) -> dict[str, Any]:
    """Throughput against replicas on one window, whose figures at the setting are `known`."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress("scaling", done, None)

    keys = ("ulysses", "cluster", "libra", "ideal")
    fixed = fixed_batch(packs, setting, schemes=keys, most=most, known=known, progress=step)
    growing = weak(packs, setting, alone=known["ulysses"], most=most, progress=step, seed=seed)
    return {
        "fixed_batch": [point.as_dict() for point in fixed],
        "weak": [point.as_dict() for point in growing],
    }


def worker_loads(packs: Packs, setting: Setting) -> dict[str, Any]:
    """Load of each worker of the first pool, before and after."""
    size, dp = setting.config.pool_size, setting.parallelism.dp
    members = deal_pools(packs.workloads, size, dp // size, order="index")[0]
    plan = plan_pool(
        [packs.cu_seqlens(int(pack)) for pack in members],
        cp_size=setting.parallelism.cp,
        config=setting.config,
        heads=setting.heads,
        tokens=packs.tokens,
    )
    mean = max(float(plan.load.mean()), 1.0)
    # Ulysses shares a pack equally in its group.
    groups = plan.home_load.reshape(size, -1).mean(axis=1)
    return {
        "title": f"First pool of the first compared window: {plan.workers} workers",
        "before": (np.repeat(groups, setting.parallelism.cp) / mean).tolist(),
        "after": (plan.load / mean).tolist(),
    }


def microbatch_times(schemes: dict[str, list[SchemeFigures]], setting: Setting) -> dict[str, Any]:
    """How long the attention of a microbatch takes in one layer, both passes."""
    spread = setting.parallelism
    times = {
        key: np.concatenate(
            [each.replicas(each.forward + each.backward, spread).ravel() for each in windows]
        )
        for key, windows in schemes.items()
        if key in ("ulysses", "libra")
    }
    longest = max(float(each.max()) for each in times.values())
    edges = np.linspace(0.0, longest * (1 + 1e-9) or 1.0, 41)
    return {
        "edges": edges.tolist(),
        "counts": {key: np.histogram(each, edges)[0].tolist() for key, each in times.items()},
    }


def pipeline_rows(
    schemes: dict[str, list[SchemeFigures]], setting: Setting
) -> list[dict[str, Any]]:
    """Bubble shares with as many replicas and ever more stages."""
    rows = []
    for schedule in _SCHEDULES:
        for stages in _STAGES if setting.parallelism.pp == 1 else (setting.parallelism.pp,):
            try:
                spread = replace(
                    setting.parallelism,
                    pp=stages,
                    schedule=schedule,
                    virtual_stages=2 if schedule == "interleaved" else 1,
                )
                spread.chunk_layers(setting.model)
            except ValueError:
                continue  # stages that don't divide layers or microbatches
            at = replace(setting, parallelism=spread)
            rows.append(
                {
                    "schedule": schedule,
                    "stages": stages,
                    "microbatches": spread.microbatches,
                    "bubble": {
                        key: float(np.mean([each.step(at).bubble_share for each in schemes[key]]))
                        for key in ("ulysses", "libra", "ideal")
                        if key in schemes
                    },
                }
            )
    return rows
