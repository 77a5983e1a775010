"""A study on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from libra.cli.units import show_seconds


def print_study(found: Mapping[str, Any], console: Console) -> None:
    """Corpus, imbalance against P, candidates, schemes, warnings, and the recommendation last."""
    corpus, spread = found["corpus"], found["settings"]["parallelism"]
    console.print(
        f"[bold]{corpus['samples']:,}[/] samples, {corpus['tokens'] / 1e9:.2f} G tokens, median "
        f"{corpus['median']:,.0f}, longest {corpus['longest']:,}; {corpus['windows']:,} windows of "
        f"{spread['global_batch']} packs of {spread['tokens']:,} tokens, "
        f"{corpus['windows_replayed']:,} replayed",
        highlight=False,
    )
    _print_pooling(found, console)
    _print_candidates(found, console)
    _print_schemes(found, console)
    for warning in found["warnings"]:
        console.print(f"[yellow]note[/] {warning}", highlight=False)
    advice = found["recommendation"]
    console.print(f"\n[bold]{advice['text']}[/]", highlight=False)
    if advice["line"] is not None:
        console.print(f"\n    {advice['line']}\n", highlight=False, markup=False, soft_wrap=True)


def _print_pooling(found: Mapping[str, Any], console: Console) -> None:
    if not found["pooling"]:
        return
    table = Table(title="Imbalance between pools, max / mean - 1", title_justify="left")
    for name in ("P", "as they come", "at random", "theory", "VRSP", "refined", "bound"):
        table.add_column(name, justify="right")
    for row in found["pooling"]:
        keys = ("before", "random", "theory", "after_greedy", "after", "bound")
        table.add_row(str(row["pool_size"]), *(f"{row[key]:.4f}" for key in keys))
    console.print(table)


def _print_candidates(found: Mapping[str, Any], console: Console) -> None:
    table = Table(
        title="Candidates: one layer's attention, one pool; step of the whole model",
        title_justify="left",
    )
    for name in ("", "P", "B", "H", "pools", "workers", "GB moved", "between nodes", "sent, worst"):
        table.add_column(name, justify="right")
    for name in ("held", "plan", "exposed", "memory", "step", "95%"):
        table.add_column(name, justify="right")
    best = found["recommendation"]["candidate"]
    for i, row in enumerate(found["candidates"]):
        table.add_row(
            "*" if i == best else "",
            str(row["pool_size"]),
            str(row["block_size"]),
            str(row["head_shards"]),
            f"{row['after']:.3f}",
            f"{row['intra_mean']:.3f}",
            f"{row['gigabytes']:.1f}",
            f"{row['between_nodes_gigabytes']:.1f}",
            f"{row['sent_worst_gigabytes']:.2f}",
            f"{row['extra_memory_gigabytes']:.1f} GB",
            f"{row['plan_milliseconds']:.1f} ms",
            f"{row['exposed_share']:.1%}",
            f"{row['memory_gigabytes']:.1f} GB" + ("" if row["fits"] else " [red]too much[/]"),
            show_seconds(row["step_seconds"]),
            f"{row['step_low']:.2f}-{row['step_high']:.2f}",
            style="bold" if i == best else None,
        )
    console.print(table)


def _print_schemes(found: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Schemes: step time of the slowest pool", title_justify="left")
    for name in ("", "step", "attention", "exposed", "other", "speedup"):
        table.add_column(name, justify="right" if name else "left")
    for row in found["schemes"]:
        table.add_row(
            row["label"],
            *(
                show_seconds(row[f"{part}_seconds"])
                for part in ("step", "attention", "exposed", "other")
            ),
            f"{row['speedup']:.2f}x",
        )
    console.print(table)
