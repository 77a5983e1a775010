"""From step times to what is compared: ratios inside one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from libra.bench.schemes import NAMES, Scheme

if TYPE_CHECKING:
    from libra.bench.measure import StepTimes

BASELINE: Final[Scheme] = "ulysses"
PARTS: Final = ("compute", "exposed", "wait")


def compare(times: Mapping[Scheme, Sequence[StepTimes]]) -> dict[str, dict[str, Any]]:
    """Figures of every scheme.

    `mean_seconds` and the parts are means over all steps; `max_seconds` is the slowest step of a
    window, as a mean over windows, and `max_parts` its parts.  Where Ulysses ran, `of_ulysses` has
    the same over Ulysses' `mean_seconds` (the maxima over its `max_seconds`), `speedup` and
    `max_speedup` are their inverses, `predicted` is the speedup that the busiest loads allow, and
    `cpu_speedup` that in CPU seconds of the busiest rank, for CPUs that others use as well.
    """
    found = {scheme: _figures(steps) for scheme, steps in times.items()}
    base = found.get(BASELINE)
    if base is None:
        return {scheme: dict(figures) for scheme, figures in found.items()}
    for figures in found.values():
        mean, worst = base["mean_seconds"], base["max_seconds"]
        figures["of_ulysses"] = {
            "mean": figures["mean_seconds"] / mean,
            "max": figures["max_seconds"] / worst,
            **{part: figures["parts"][part] / mean for part in PARTS},
            **{f"max_{part}": figures["max_parts"][part] / worst for part in PARTS},
        }
        figures["speedup"] = mean / figures["mean_seconds"]
        figures["max_speedup"] = worst / figures["max_seconds"]
        figures["cpu_speedup"] = base["cpu_seconds"] / figures["cpu_seconds"]
        figures["predicted"] = base["busiest_load"] / figures["busiest_load"]
    return {scheme: dict(figures) for scheme, figures in found.items()}


def _figures(steps: Sequence[StepTimes]) -> dict[str, Any]:
    windows = sorted({step.window for step in steps})
    slowest = [
        max((step for step in steps if step.window == window), key=lambda step: step.straggler)
        for window in windows
    ]
    return {
        "steps": [asdict(step) for step in steps],
        "mean_seconds": _mean(steps, "straggler"),
        "max_seconds": _mean(slowest, "straggler"),
        "parts": {part: _mean(steps, part) for part in PARTS},
        "max_parts": {part: _mean(slowest, part) for part in PARTS},
        "cpu_seconds": _mean(steps, "cpu"),
        "busiest_load": _mean(steps, "load"),
        "megabytes": _mean(steps, "sent") / 1e6,
    }


def _mean(steps: Sequence[StepTimes], name: str) -> float:
    return float(np.mean([getattr(step, name) for step in steps]))


def print_figures(found: Mapping[str, Any], console: Console) -> None:
    """The run as a table; `found` as `libra bench --json` writes it."""
    about, schemes = found["settings"], found["schemes"]
    console.print(
        f"{found['machine']}; DP {found['dp']}, CP {about['cp']}; packs of {about['tokens']:,} "
        f"tokens, {about['global_batch']} a window, windows: {about['windows']}; "
        f"heads {about['heads']}/{about['kv_heads']}/{about['head_dim']}",
        highlight=False,
        markup=False,
    )
    normal = BASELINE in schemes
    table = Table(
        title="straggler time of one attention layer, forward and backward"
        + (", Ulysses = 1" if normal else "")
    )
    table.add_column("scheme")
    for name in (
        "mean ms",
        "max ms",
        "mean",
        "max",
        *PARTS,
        "speedup",
        "in CPU s",
        "by loads",
        "MB sent",
    ):
        if normal or name.endswith("ms") or name == "MB sent" or name in PARTS:
            table.add_column(name, justify="right")
    for scheme, figures in schemes.items():
        table.add_row(NAMES[scheme], *_cells(figures, normal))
    console.print(table)
    console.print(
        "max: the slowest step of a window.  mean = compute + exposed + wait, means over ranks"
        f"{'' if normal else ', in ms'}.\nTAP and TAP + VRSP run without overlap: chunks=1.",
        highlight=False,
    )


def _cells(figures: Mapping[str, Any], normal: bool) -> list[str]:
    cells = [f"{figures[name] * 1e3:.1f}" for name in ("mean_seconds", "max_seconds")]
    if normal:
        ratios = figures["of_ulysses"]
        cells += [f"{ratios[name]:.3f}" for name in ("mean", "max", *PARTS)]
        cells += [f"{figures[name]:.2f}x" for name in ("speedup", "cpu_speedup", "predicted")]
    else:
        cells += [f"{figures['parts'][part] * 1e3:.1f}" for part in PARTS]
    return [*cells, f"{figures['megabytes']:.1f}"]
