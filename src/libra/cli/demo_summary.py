"""What the demo measured: figures from the training run's lines, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

Event = Mapping[str, Any]
_ROWS_SHOWN = 20
_BUSY = 0.85
"""A straggler computes all the time, unless others have its core."""


@dataclass(frozen=True, slots=True, eq=False)
class SchemeFigures:
    """One scheme's steps."""

    loss: NDArray[np.float64]
    """Mean loss over the tokens of each step, [steps]."""
    attention: NDArray[np.float64]
    """Straggler's attention seconds of each step, forward and backward with its waits, [steps]."""
    attention_cpu: NDArray[np.float64]
    """CPU seconds of the rank that computed longest in it, [steps]."""
    step: NDArray[np.float64]
    """Seconds of each step, slowest rank, [steps]."""
    load: NDArray[np.int64]
    """Query-key pairs times heads of the most loaded worker, per step and layer, [steps]."""
    bytes_sent: dict[str, int]
    """Forward bytes that travelled as q, k with v, and o, all ranks, steps and layers."""


def scheme_figures(events: Sequence[Event], scheme: str, layers: int) -> SchemeFigures:
    """Collect the step events of one scheme.  ValueError if there are none."""
    steps = [e for e in events if e["event"] == "step" and e["scheme"] == scheme]
    if not steps:
        raise ValueError(f"the training run reported no step of scheme {scheme!r}")
    return SchemeFigures(
        loss=np.array([e["loss"] for e in steps]),
        attention=np.array([max(e["attention_seconds"]) for e in steps]),
        attention_cpu=np.array([max(e["attention_cpu_seconds"]) for e in steps]),
        step=np.array([max(e["step_seconds"]) for e in steps]),
        load=np.array([max(e["load"]) for e in steps], dtype=np.int64),
        bytes_sent={
            kind: layers * sum(sum(e["bytes_sent"][kind]) for e in steps)
            for kind in steps[0]["bytes_sent"]
        },
    )


def summarise(events: Sequence[Event]) -> dict[str, Any]:
    """The figures of a whole run, ready for JSON.

    Speedups are ratios of sums over steps, so that measured and predicted weigh steps alike: of the
    stragglers' attention seconds, and of the heaviest workers' loads.
    """
    start = next(e for e in events if e["event"] == "start")
    layers = start["decoder"]["layers"]
    baseline = scheme_figures(events, "baseline", layers)
    libra = scheme_figures(events, "libra", layers)
    measured = float(baseline.attention.sum() / libra.attention.sum())
    predicted = float(baseline.load.sum() / libra.load.sum())
    return {
        "ranks": start["ranks"],
        "config": start["config"],
        "decoder": start["decoder"],
        "loss": {"baseline": baseline.loss.tolist(), "libra": libra.loss.tolist()},
        "largest_loss_difference": float(np.abs(baseline.loss - libra.loss).max()),
        "straggler_attention_seconds": _pair(baseline.attention, libra.attention),
        "attention_cpu_seconds": _pair(baseline.attention_cpu, libra.attention_cpu),
        "step_seconds": _pair(baseline.step, libra.step),
        "attention_speedup": {
            "measured": measured,
            "predicted": predicted,
            "measured_over_predicted": measured / predicted,
            "cpu": float(baseline.attention_cpu.sum() / libra.attention_cpu.sum()),
        },
        "step_speedup": float(baseline.step.sum() / libra.step.sum()),
        "core_share": float(baseline.attention_cpu.sum() / baseline.attention.sum()),
        "heaviest_load": {"baseline": baseline.load.tolist(), "libra": libra.load.tolist()},
        "forward_bytes_moved": {"baseline": baseline.bytes_sent, "libra": libra.bytes_sent},
    }


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Two tables: step by step, and the run as a whole; and a word if the machine was busy."""
    console.print(_steps_table(summary))
    console.print(_totals_table(summary))
    if summary["core_share"] < _BUSY:
        console.print(
            f"[yellow]The stragglers had {summary['core_share']:.0%} of a core each: this machine "
            "was busy, or has fewer cores than ranks.  Trust the CPU times.[/]"
        )


def _pair(baseline: NDArray[np.float64], libra: NDArray[np.float64]) -> dict[str, Any]:
    return {
        "baseline": float(baseline.mean()),
        "libra": float(libra.mean()),
        "per_step": {"baseline": baseline.tolist(), "libra": libra.tolist()},
    }


def _steps_table(summary: Mapping[str, Any]) -> Table:
    table = Table(title="Each step", title_justify="left")
    for heading in (
        "step",
        "loss\nbaseline",
        "loss\nLibra",
        "attention s\nbaseline",
        "attention s\nLibra",
        "speedup\nmeasured",
        "speedup\npredicted",
    ):
        table.add_column(heading, justify="right")
    loss, load = summary["loss"], summary["heaviest_load"]
    seconds = summary["straggler_attention_seconds"]["per_step"]
    steps = len(loss["libra"])
    shown = np.unique(np.linspace(0, steps - 1, min(steps, _ROWS_SHOWN)).round().astype(int))
    for i in shown.tolist():
        table.add_row(
            str(i),
            f"{loss['baseline'][i]:.5f}",
            f"{loss['libra'][i]:.5f}",
            f"{seconds['baseline'][i]:.3f}",
            f"{seconds['libra'][i]:.3f}",
            f"{seconds['baseline'][i] / seconds['libra'][i]:.2f}x",
            f"{load['baseline'][i] / load['libra'][i]:.2f}x",
        )
    return table


def _totals_table(summary: Mapping[str, Any]) -> Table:
    table = Table(title="The run", title_justify="left")
    table.add_column("")
    for heading in ("baseline", "Libra", "speedup"):
        table.add_column(heading, justify="right")
    attention, step = summary["straggler_attention_seconds"], summary["step_seconds"]
    speedup = summary["attention_speedup"]
    table.add_row(
        "straggler attention, s a step",
        f"{attention['baseline']:.3f}",
        f"{attention['libra']:.3f}",
        f"[bold]{speedup['measured']:.2f}x[/]",
    )
    cpu = summary["attention_cpu_seconds"]
    table.add_row(
        "  CPU time of it",
        f"{cpu['baseline']:.3f}",
        f"{cpu['libra']:.3f}",
        f"{speedup['cpu']:.2f}x",
    )
    table.add_row(
        "  predicted by the plans' loads", "", "", f"[bold]{speedup['predicted']:.2f}x[/]"
    )
    table.add_row(
        "whole step, s",
        f"{step['baseline']:.3f}",
        f"{step['libra']:.3f}",
        f"{summary['step_speedup']:.2f}x",
    )
    moved = {name: sum(kinds.values()) for name, kinds in summary["forward_bytes_moved"].items()}
    table.add_row(
        "forward bytes moved, MB",
        f"{moved['baseline'] / 1e6:.1f}",
        f"{moved['libra'] / 1e6:.1f}",
        "",
    )
    table.add_row("largest loss difference", "", f"{summary['largest_loss_difference']:.1e}", "")
    return table
