"""The demo's figures, made from the lines that the training run prints, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table

Event = Mapping[str, Any]
Pair = Mapping[str, NDArray[Any]]
"""One array of each scheme, [steps]."""

_SCHEMES = ("baseline", "libra")
_ROWS_SHOWN = 20
_BUSY = 0.85
"""Share of a core below which a straggler, which always computes, must have lost it to others."""


def summarise(events: Sequence[Event]) -> dict[str, Any]:
    """The figures of a whole run, ready for JSON.

    Times and loads are those of the slowest or most loaded rank of each step.  Speedups are ratios
    of their sums over steps, so that measured and predicted speedups weigh the steps alike.  Raises
    ValueError if a scheme reported no step.
    """
    start = next(event for event in events if event["event"] == "start")
    steps = {scheme: [e for e in events if e.get("scheme") == scheme] for scheme in _SCHEMES}
    for scheme, reported in steps.items():
        if not reported:
            raise ValueError(f"the training run reported no step of scheme {scheme!r}")
    loss, attention, cpu, whole, load = (
        {scheme: np.array([np.max(step[name]) for step in steps[scheme]]) for scheme in _SCHEMES}
        for name in ("loss", "attention_seconds", "attention_cpu_seconds", "step_seconds", "load")
    )
    measured, predicted = _speedup(attention), _speedup(load)
    moved = {scheme: _bytes_moved(steps[scheme], start["decoder"]["layers"]) for scheme in _SCHEMES}
    return {
        **{name: start[name] for name in ("ranks", "config", "decoder")},
        "loss": _lists(loss),
        "largest_loss_difference": float(np.abs(loss["baseline"] - loss["libra"]).max()),
        "straggler_attention_seconds": _means(attention),
        "attention_cpu_seconds": _means(cpu),
        "step_seconds": _means(whole),
        "attention_speedup": {
            "measured": measured,
            "predicted": predicted,
            "measured_over_predicted": measured / predicted,
            "cpu": _speedup(cpu),
        },
        "step_speedup": _speedup(whole),
        "core_share": float(cpu["baseline"].sum() / attention["baseline"].sum()),
        "heaviest_load": _lists(load),
        "forward_bytes_moved": moved,
    }


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Two tables, of the steps and of the whole run, and a warning if the machine was busy."""
    console.print(_steps_table(summary))
    console.print(_totals_table(summary))
    if summary["core_share"] < _BUSY:
        console.print(
            f"[yellow]The slowest ranks had {summary['core_share']:.0%} of a core each: this "
            "machine was busy, or has fewer cores than ranks.  Trust the CPU times.[/]"
        )


def _speedup(pair: Pair) -> float:
    return float(pair["baseline"].sum() / pair["libra"].sum())


def _bytes_moved(steps: Sequence[Event], layers: int) -> dict[str, int]:
    """Forward bytes that travelled as q, k with v, and o: all ranks, steps and layers."""
    kinds = steps[0]["bytes_sent"]
    return {kind: layers * sum(sum(e["bytes_sent"][kind]) for e in steps) for kind in kinds}


def _lists(pair: Pair) -> dict[str, list[float]]:
    return {scheme: values.tolist() for scheme, values in pair.items()}


def _means(pair: Pair) -> dict[str, Any]:
    means = {scheme: float(values.mean()) for scheme, values in pair.items()}
    return {**means, "per_step": _lists(pair)}


def _steps_table(summary: Mapping[str, Any]) -> Table:
    headings = ["step", "loss\nbaseline", "loss\nLibra", "attention s\nbaseline"]
    headings += ["attention s\nLibra", "speedup\nmeasured", "speedup\npredicted"]
    table = Table(*map(_right, headings), title="Each step", title_justify="left")
    seconds = summary["straggler_attention_seconds"]["per_step"]
    pairs = (summary["loss"], seconds, summary["heaviest_load"])
    rows = list(zip(*(pair[scheme] for pair in pairs for scheme in _SCHEMES), strict=True))
    shown = np.linspace(0, len(rows) - 1, min(len(rows), _ROWS_SHOWN)).round().astype(int)
    for i in np.unique(shown).tolist():
        loss, loss_libra, time, time_libra, load, load_libra = rows[i]
        figures = [f"{loss:.5f}", f"{loss_libra:.5f}", f"{time:.3f}", f"{time_libra:.3f}"]
        figures += [f"{time / time_libra:.2f}x", f"{load / load_libra:.2f}x"]
        table.add_row(str(i), *figures)
    return table


def _totals_table(summary: Mapping[str, Any]) -> Table:
    headings = map(_right, ("baseline", "Libra", "speedup"))
    table = Table("", *headings, title="The run", title_justify="left")
    speedups = {**summary["attention_speedup"], "step": summary["step_speedup"]}
    for name, key, ratio in (
        ("attention of the slowest rank, s a step", "straggler_attention_seconds", "measured"),
        ("  its CPU time", "attention_cpu_seconds", "cpu"),
        ("whole step, s", "step_seconds", "step"),
    ):
        times = [f"{summary[key][scheme]:.3f}" for scheme in _SCHEMES]
        table.add_row(name, *times, f"{speedups[ratio]:.2f}x")
    table.add_row("attention predicted by the loads", "", "", f"{speedups['predicted']:.2f}x")
    moved = [sum(summary["forward_bytes_moved"][scheme].values()) / 1e6 for scheme in _SCHEMES]
    table.add_row("forward bytes moved, MB", *(f"{megabytes:.1f}" for megabytes in moved))
    table.add_row("largest loss difference", "", f"{summary['largest_loss_difference']:.1e}")
    return table


def _right(heading: str) -> Column:
    return Column(heading, justify="right")
