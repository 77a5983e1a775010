"""One pool's plan on a terminal: the workers, and the other placements of the same pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from libra.cli.plan_report import ByKind, PassReport, PlanReport
from libra.cli.units import ByteUnit, byte_unit, show_bytes, show_seconds

IntArray = NDArray[np.int64]

MOST_ROWS = 32
"""Most workers that get a row each; a larger pool gets a row for each replica."""
_WIDE = 104
"""Least columns of a terminal on which bytes are split into Q, K with V, and O."""


def print_plan(report: PlanReport, console: Console) -> None:
    """Print header, tables and summary."""
    _print_header(report, console)
    by_kind = console.width >= _WIDE
    console.print(workers_table(report, by_kind=by_kind))
    if report.workers > MOST_ROWS:
        console.print(extremes_table(report))
    console.print(placements_table(report, by_kind=by_kind))
    _print_summary(report, console)


def _print_header(report: PlanReport, console: Console) -> None:
    corpus, replicas = report.corpus, len(report.corpus.pool_packs)
    dropped = (
        f", {corpus.dropped_samples:,} longer than a pack dropped" if corpus.dropped_samples else ""
    )
    console.print(
        f"Corpus   {corpus.samples:,} samples{dropped}; {corpus.packs:,} packs of "
        f"{report.tokens:,} tokens",
        f"Window   {corpus.window}: {corpus.global_batch} packs in {corpus.pools} pools of "
        f"{replicas}, imbalance between pools {corpus.pools_imbalance:.4f}",
        f"Pool     {corpus.pool}: {replicas} packs, {corpus.pool_samples:,} samples, "
        f"{replicas * report.tokens:,} tokens, {report.workers} workers (CP {report.cp_size})",
        f"Plan     {report.config.placement}: {report.tiles:,} tiles "
        f"({report.blocks:,} blocks x {report.tiles // report.blocks} head shards), planned in "
        f"[bold]{show_seconds(report.planning_seconds)}[/]",
        sep="\n",
        highlight=False,
    )


def workers_table(report: PlanReport, *, by_kind: bool) -> Table:
    """A row for each worker, or for each replica of a larger pool.

    A replica's row has its mean load at home, its sums of bytes and segments, and its workers'
    largest planned load and memory.
    """
    # Step 1: the figures of every row.  With 64 workers and CP 8, row 1 stands for workers 8-15.
    workers, cp = report.per_worker, report.cp_size
    each = report.workers <= MOST_ROWS
    rows = (-1, 1 if each else cp)  # a row stands for one worker or for cp of them
    if each:
        title = "Workers: loads in means of the pool; bytes of a forward pass"
        names = [(str(w // cp) if w % cp == 0 else "", str(w)) for w in range(report.workers)]
    else:
        title = "Replicas: loads in means of the pool; forward sums over workers, * the most of one"
        names = [(str(w // cp), f"{w}-{w + cp - 1}") for w in range(0, report.workers, cp)]
    home = _relative(workers.home_load).reshape(rows).mean(axis=1)
    planned = _relative(workers.load).reshape(rows).max(axis=1)
    held = workers.extra_memory["total"].reshape(rows).max(axis=1)
    segments = workers.segments.reshape(rows).sum(axis=1)
    sent, received = (
        _kinds(moved).reshape(3, *rows).sum(axis=2) for moved in (workers.sent, workers.received)
    )
    # Step 2: one unit for a whole table, by the largest bytes of a single worker.
    unit = byte_unit(max(int(_kinds(b).max()) for b in (workers.sent, workers.received)))
    memory = byte_unit(int(held.max()))

    # Step 3: headings of two lines; a narrow terminal has one column of bytes in place of three.
    mark = "" if each else "*"
    kinds = (f"Q {unit.name}", "K, V", "O") if by_kind else (unit.name,)
    table = _table(
        title,
        (
            *("replica", "worker" if each else "workers", "load\nhome", f"\nplanned{mark}"),
            *(f"{'' if i else 'sent'}\n{kind}" for i, kind in enumerate(kinds)),
            *(f"{'' if i else 'received'}\n{kind}" for i, kind in enumerate(kinds)),
            *(f"memory\n{memory.name}{mark}", "seg-\nments"),
        ),
        first="right",
    )
    for row, name in enumerate(names):
        table.add_row(
            *name,
            f"{home[row]:.3f}",
            f"{planned[row]:.3f}",
            *_bytes(sent[:, row], unit, by_kind),
            *_bytes(received[:, row], unit, by_kind),
            memory.show(held[row]),
            str(segments[row]),
            end_section=each and row % cp == cp - 1,
        )
    return table


def extremes_table(report: PlanReport) -> Table:
    """The workers that stand out."""
    workers = report.per_worker
    # Every row: name, a figure of all workers, the worker that stands out, and its format.
    before, after = _relative(workers.home_load), _relative(workers.load)
    sent, received = (_kinds(moved).sum(axis=0) for moved in (workers.sent, workers.received))
    memory, segments = workers.extra_memory["total"], workers.segments
    table = _table("Extremes", ("", "worker", ""))
    for name, values, worker, show in (
        ("heaviest load at home", before, before.argmax(), "{:.3f} x mean".format),
        ("heaviest load planned", after, after.argmax(), "{:.3f} x mean".format),
        ("lightest load planned", after, after.argmin(), "{:.3f} x mean".format),
        ("sends most, forward", sent, sent.argmax(), show_bytes),
        ("receives most, forward", received, received.argmax(), show_bytes),
        ("most extra memory", memory, memory.argmax(), show_bytes),
        ("largest workspace", workers.workspace, workers.workspace.argmax(), show_bytes),
        ("most kernel segments", segments, segments.argmax(), str),
    ):
        table.add_row(name, str(worker), show(values[worker]))
    return table


def placements_table(report: PlanReport, *, by_kind: bool) -> Table:
    """This plan next to the other placements of the same pool."""
    # Totals share one unit and so do the busiest workers, so that rows compare at a glance.
    every = report.placements
    unit = byte_unit(max(max(p.total_traffic, p.total_backward_traffic) for p in every))
    worst = byte_unit(max(max(p.worst) for p in every))
    busiest = (f"busiest\nout {worst.name}", "\nin")
    kinds = ("\nQ", "\nK, V", "\nO") if by_kind else ()
    forward, backward = f"forward\n{unit.name}", f"backward\n{unit.name}"
    table = _table(
        "Placements of this pool",
        ("placement", "\nimbalance", forward, *kinds, *busiest, backward, *busiest),
    )
    for placed in every:
        table.add_row(
            placed.placement,
            f"{placed.imbalance:.4f}",
            unit.show(placed.total_traffic),
            *(unit.show(int(value)) for value in placed.traffic.values() if by_kind),
            *map(worst.show, placed.worst[:2]),
            unit.show(placed.total_backward_traffic),
            *map(worst.show, placed.worst[2:]),
            style="bold" if placed is report.placed else None,
        )
    return table


def _print_summary(report: PlanReport, console: Console) -> None:
    placed, ulysses = report.placed, report.ulysses
    if report.ulysses_refused:
        console.print(report.ulysses_refused, highlight=False, markup=False)
    baseline = f", with Ulysses {ulysses.imbalance:.4f}" if ulysses else ""
    forward = _traffic(placed.total_traffic, *placed.worst[:2])
    backward = _traffic(placed.total_backward_traffic, *placed.worst[2:])
    console.print(
        f"Imbalance  at home {report.imbalance.home:.4f}{baseline}, "
        f"planned [bold]{placed.imbalance:.4f}[/]",
        f"Traffic    forward {forward}",
        f"           backward {backward}",
        f"Bound      {_bound(report)}",
        f"Modelled   a layer forward {_modelled(report.modelled.forward)}",
        f"           and backward {_modelled(report.modelled.backward)}",
        sep="\n",
        highlight=False,
    )


def _traffic(total: int, worst_sent: int, worst_received: int) -> str:
    return (
        f"[bold]{show_bytes(total)}[/]; the busiest worker sends "
        f"{show_bytes(worst_sent)} and receives {show_bytes(worst_received)}"
    )


def _bound(report: PlanReport) -> str:
    balance = f"a balance within {report.config.tolerance:g}"
    if report.bound.ratio is None:
        return f"none known: {balance} may cost no traffic"
    return (
        f"{balance} costs at least {show_bytes(report.bound.traffic)} forward; "
        f"this plan moves [bold]{report.bound.ratio:.2f}[/] times that"
    )


def _modelled(line: PassReport) -> str:
    compute, exposed = float(line.compute.max()), float(line.exposed.max())
    text = (
        f"[bold]{show_seconds(line.makespan)}[/]: compute {show_seconds(compute)}, "
        f"exposed at worst {show_seconds(exposed)}"
    )
    if line.ulysses_compute is None:
        return text
    return f"{text}; Ulysses computes {show_seconds(line.ulysses_compute)}"


def _table(title: str, headings: Sequence[str], *, first: str = "left") -> Table:
    """A table without rows; all columns but the first are aligned to the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column, heading in enumerate(headings):
        left = column == 0 and first == "left"
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table


def _bytes(kinds: IntArray, unit: ByteUnit, by_kind: bool) -> list[str]:
    """Cells of one row's bytes, `kinds` [3]."""
    return [unit.show(value) for value in (kinds if by_kind else [kinds.sum()])]


def _kinds(moved: ByKind) -> IntArray:
    """[kinds, workers]."""
    return np.stack(list(moved.values()))


def _relative(load: IntArray) -> NDArray[np.float64]:
    return np.asarray(load / load.mean(), dtype=np.float64)
