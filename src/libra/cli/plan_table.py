"""One pool's plan on a terminal: the workers, and the other placements of the same pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from libra.cli.plan_report import PassBytes, PlanReport
from libra.cli.units import byte_unit, show_bytes, show_seconds
from libra.cost.kernel_table import DIRECTIONS, Direction
from libra.data.lengths import IntArray
from libra.data.pools import imbalance

Column = tuple[str, Iterable[str]]
"""Heading and cells."""

MOST_ROWS = 32
"""Most workers that get a row each; a larger pool gets a row for each replica."""
_WIDE = 104
"""Least columns of a terminal on which bytes are split into Q, K with V, and O."""


def print_plan(report: PlanReport, console: Console) -> None:
    """Print header, tables and summary."""
    _print_header(report, console)
    by_kind = console.width >= _WIDE
    console.print(workers_table(report, by_kind=by_kind))
    if report.plan.workers > MOST_ROWS:
        console.print(extremes_table(report))
    console.print(placements_table(report, by_kind=by_kind))
    _print_summary(report, console)


def _print_header(report: PlanReport, console: Console) -> None:
    origin, plan, replicas = report.origin, report.plan, len(report.origin.pool_packs)
    left_out = origin.dropped_samples
    dropped = f", {left_out:,} longer than a pack dropped" if left_out else ""
    console.print(
        f"Corpus   {origin.samples:,} samples{dropped}; {origin.packs:,} packs of "
        f"{plan.tokens:,} tokens",
        f"Window   {origin.window}: {origin.global_batch} packs in {origin.pools} pools of "
        f"{replicas}, imbalance between pools {origin.pools_imbalance:.4f}",
        f"Pool     {origin.pool}: {replicas} packs, {origin.pool_samples:,} samples, "
        f"{replicas * plan.tokens:,} tokens, {plan.workers} workers (CP {plan.cp_size})",
        f"Plan     {plan.config.placement}: {len(plan.assignment):,} tiles "
        f"({len(plan.geometry.block_start):,} blocks x {plan.shards} head shards), planned in "
        f"[bold]{show_seconds(report.planning_seconds)}[/]",
        sep="\n",
        highlight=False,
    )


def workers_table(report: PlanReport, *, by_kind: bool) -> Table:
    """A row for each worker, or for each replica of a larger pool.

    A replica's row has its mean load at home, its sums of bytes and segments, and its workers'
    largest planned load and memory.
    """
    # Step 1: what a row stands for.  With 64 workers and CP 8, row 1 stands for workers 8-15.
    plan, traffic, cp = report.plan, report.lines.traffic, report.plan.cp_size
    each = plan.workers <= MOST_ROWS
    first = range(0, plan.workers, 1 if each else cp)
    rows = (len(first), -1)
    title = (
        "Workers: loads in means of the pool; bytes of a forward pass"
        if each
        else "Replicas: loads in means of the pool; forward sums over workers, * the most of one"
    )

    # Step 2: bytes, in one unit by the largest of a single worker; a narrow terminal has one column
    # of them in place of three.
    ways = {"sent": plan.traffic.sum(axis=2), "received": plan.traffic.sum(axis=1)}
    unit = byte_unit(max(int(moved.max()) for moved in ways.values()))
    kinds = (f"Q {unit.name}", "K, V", "O") if by_kind else (unit.name,)
    moved_columns: list[Column] = []
    for way, moved in ways.items():
        sums = moved.reshape(len(kinds), 3 // len(kinds), *rows).sum(axis=(1, 3))
        headings = (f"{way}\n{kinds[0]}", *(f"\n{kind}" for kind in kinds[1:]))
        moved_columns += zip(headings, (map(unit.show, row) for row in sums), strict=True)

    # Step 3: all columns.
    home = _relative(plan.home_load).reshape(rows).mean(axis=1)
    planned = _relative(plan.load).reshape(rows).max(axis=1)
    held = traffic.extra_memory.reshape(rows).max(axis=1)
    memory, mark = byte_unit(int(held.max())), "" if each else "*"
    workers = [str(w) if each else f"{w}-{w + cp - 1}" for w in first]
    table = _table(
        title,
        ("replica", [str(w // cp) if w % cp == 0 else "" for w in first]),
        ("worker" if each else "workers", workers),
        ("load\nhome", map("{:.3f}".format, home)),
        (f"\nplanned{mark}", map("{:.3f}".format, planned)),
        *moved_columns,
        (f"memory\n{memory.name}{mark}", map(memory.show, held)),
        ("seg-\nments", map(str, traffic.segments.reshape(rows).sum(axis=1))),
    )
    # A line of space after each replica's last worker.
    for last in table.rows[cp - 1 :: cp] if each else ():
        last.end_section = True
    return table


def extremes_table(report: PlanReport) -> Table:
    """The workers that stand out."""
    plan, traffic = report.plan, report.lines.traffic
    # Every row: name, a figure of all workers, the worker that stands out, and its format.
    before, after = _relative(plan.home_load), _relative(plan.load)
    sent, received = (plan.traffic.sum(axis=(0, axis)) for axis in (2, 1))
    memory, segments, workspace = traffic.extra_memory, traffic.segments, report.memory.workspace
    rows = [
        (name, str(worker), show(values[worker]))
        for name, values, worker, show in (
            ("heaviest load at home", before, before.argmax(), "{:.3f} x mean".format),
            ("heaviest load planned", after, after.argmax(), "{:.3f} x mean".format),
            ("lightest load planned", after, after.argmin(), "{:.3f} x mean".format),
            ("sends most, forward", sent, sent.argmax(), show_bytes),
            ("receives most, forward", received, received.argmax(), show_bytes),
            ("most extra memory", memory, memory.argmax(), show_bytes),
            ("largest workspace", workspace, workspace.argmax(), show_bytes),
            ("most kernel segments", segments, segments.argmax(), str),
        )
    ]
    # From rows to the columns of a table.
    names, workers, figures = zip(*rows, strict=True)
    return _table("Extremes", ("", names), ("worker", workers), ("", figures), first="left")


def placements_table(report: PlanReport, *, by_kind: bool) -> Table:
    """This plan next to the other placements of the same pool."""
    every = report.placements
    passes = {name: [getattr(each, name) for each in every] for name in DIRECTIONS}
    # Totals share one unit and so do the busiest workers, so that rows compare at a glance.
    moved = [*passes["forward"], *passes["backward"]]
    unit = byte_unit(max(each.total for each in moved))
    worst = byte_unit(max(max(each.sent, each.received) for each in moved))
    columns: list[Column] = [
        ("placement", [each.placement for each in every]),
        ("\nimbalance", [f"{each.imbalance:.4f}" for each in every]),
    ]
    for name, moved in passes.items():
        # Only forward is split by kind, as in the table of workers.
        columns.append((f"{name}\n{unit.name}", [unit.show(each.total) for each in moved]))
        if by_kind and name == "forward":
            for kind, heading in enumerate(("Q", "K, V", "O")):
                columns.append((f"\n{heading}", [unit.show(each.kinds[kind]) for each in moved]))
        columns.append((f"busiest\nout {worst.name}", [worst.show(each.sent) for each in moved]))
        columns.append(("\nin", [worst.show(each.received) for each in moved]))
    table = _table("Placements of this pool", *columns, first="left")
    table.rows[0].style = "bold"
    return table


def _print_summary(report: PlanReport, console: Console) -> None:
    placed, ulysses = report.placed, report.ulysses
    # The reason may hold brackets, which are no markup.
    if report.ulysses_refused:
        console.print(report.ulysses_refused, highlight=False, markup=False)
    home = imbalance(report.plan.home_load)
    baseline = f", with Ulysses {ulysses.imbalance:.4f}" if ulysses else ""
    console.print(
        f"Imbalance  at home {home:.4f}{baseline}, planned [bold]{placed.imbalance:.4f}[/]",
        f"Traffic    forward {_moved(placed.forward)}",
        f"           backward {_moved(placed.backward)}",
        f"Bound      {_bound(report)}",
        f"Modelled   a layer forward {_modelled(report, 'forward')}",
        f"           and backward {_modelled(report, 'backward')}",
        sep="\n",
        highlight=False,
    )


def _moved(moved: PassBytes) -> str:
    return (
        f"[bold]{show_bytes(moved.total)}[/]; the busiest worker sends "
        f"{show_bytes(moved.sent)} and receives {show_bytes(moved.received)}"
    )


def _bound(report: PlanReport) -> str:
    balance = f"a balance within {report.plan.config.tolerance:g}"
    if report.bound_ratio is None:
        return f"none known: {balance} may cost no traffic"
    return (
        f"{balance} costs at least {show_bytes(report.bound)} forward; "
        f"this plan moves [bold]{report.bound_ratio:.2f}[/] times that"
    )


def _modelled(report: PlanReport, direction: Direction) -> str:
    line, ulysses = getattr(report.lines, direction), report.ulysses_compute(direction)
    baseline = "" if ulysses is None else f"; Ulysses computes {show_seconds(ulysses)}"
    return (
        f"[bold]{show_seconds(line.makespan)}[/]: compute {show_seconds(line.compute.max())}, "
        f"exposed at worst {show_seconds(line.exposed.max())}{baseline}"
    )


def _table(title: str, *columns: Column, first: Literal["left", "right"] = "right") -> Table:
    """A table of these columns; all but the first are aligned to the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    table.columns[0].justify = first
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table


def _relative(load: IntArray) -> NDArray[np.float64]:
    return np.asarray(load / load.mean(), dtype=np.float64)
