"""One pool's plan on a terminal: worker by worker, and beside other placements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from libra.cli.choose_pool import ChosenPool
from libra.cli.plan_figures import Moved, Placed, PlanFigures
from libra.cli.units import ByteUnit, byte_unit, show_bytes, show_seconds
from libra.cost.timeline import Direction, pair_flops
from libra.data.vrsp import imbalance

IntArray = NDArray[np.int64]

MOST_ROWS = 32
"""Workers that get a row each; of a larger pool every replica does."""
_WIDE = 104
"""Columns of a terminal from which bytes are told apart as Q, K with V, and O."""


def print_plan(chosen: ChosenPool, figures: PlanFigures, console: Console) -> None:
    """Print header, tables and summary."""
    _print_header(chosen, figures, console)
    by_kind = console.width >= _WIDE
    if figures.plan.workers <= MOST_ROWS:
        console.print(worker_table(figures, by_kind=by_kind))
    else:
        console.print(replica_table(figures, by_kind=by_kind))
        console.print(extremes_table(figures))
    console.print(placements_table(figures, by_kind=by_kind))
    _print_summary(figures, console)


def _print_header(chosen: ChosenPool, figures: PlanFigures, console: Console) -> None:
    plan, packs = figures.plan, chosen.packs
    pools, replicas = chosen.pools.shape
    dropped = (
        f", {packs.dropped_samples:,} longer than a pack dropped" if packs.dropped_samples else ""
    )
    console.print(
        f"Corpus   {chosen.samples:,} samples{dropped}; {len(packs):,} packs of "
        f"{packs.tokens:,} tokens",
        f"Window   {chosen.window}: {chosen.global_batch} packs in {pools} pools of {replicas}, "
        f"imbalance between pools {chosen.pools_imbalance:.4f}",
        f"Pool     {chosen.pool}: {replicas} packs, {chosen.pool_samples:,} samples, "
        f"{replicas * packs.tokens:,} tokens, {plan.workers} workers (CP {plan.cp_size})",
        f"Plan     {plan.config.placement}: {len(plan.assignment):,} tiles "
        f"({len(plan.cuts):,} blocks x {plan.shards} head shards), planned in "
        f"[bold]{show_seconds(figures.planning_seconds)}[/]",
        sep="\n",
        highlight=False,
    )


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def worker_table(figures: PlanFigures, *, by_kind: bool = True) -> Table:
    """A row for each worker, replicas set apart."""
    plan, traffic, cp = figures.plan, figures.traffic, figures.plan.cp_size
    moved = figures.placed.forward
    title = "Workers: loads in means of the pool; bytes of a forward pass"
    names = [(str(w // cp) if w % cp == 0 else "", str(w)) for w in range(plan.workers)]
    loads = np.stack([_relative(plan.home_load), _relative(plan.load)])
    held = traffic.extra_memory
    table = _figures_table(title, ("replica", "worker"), figures, by_kind, mark="")
    unit, memory = _units(moved.sent, moved.received), byte_unit(int(held.max()))
    for worker, name in enumerate(names):
        table.add_row(
            *name,
            *(f"{load:.3f}" for load in loads[:, worker]),
            *_bytes(moved.sent[:, worker], unit, by_kind),
            *_bytes(moved.received[:, worker], unit, by_kind),
            memory.show(held[worker]),
            str(traffic.segments[worker]),
            end_section=worker % cp == cp - 1,
        )
    return table


def replica_table(figures: PlanFigures, *, by_kind: bool = True) -> Table:
    """A row for each replica: means, sums, and maxima where the head says so."""
    plan, traffic, cp = figures.plan, figures.traffic, figures.plan.cp_size
    moved = figures.placed.forward
    title = "Replicas: loads in means of the pool; forward sums over workers, * the most of one"
    sent, received = (kinds.reshape(3, -1, cp).sum(2) for kinds in (moved.sent, moved.received))
    home = _relative(plan.home_load).reshape(-1, cp).mean(1)
    planned = _relative(plan.load).reshape(-1, cp).max(1)
    held = traffic.extra_memory.reshape(-1, cp).max(1)
    table = _figures_table(title, ("replica", "workers"), figures, by_kind, mark="*")
    unit, memory = _units(moved.sent, moved.received), byte_unit(int(held.max()))
    for replica, segments in enumerate(traffic.segments.reshape(-1, cp).sum(1)):
        table.add_row(
            str(replica),
            f"{replica * cp}-{replica * cp + cp - 1}",
            f"{home[replica]:.3f}",
            f"{planned[replica]:.3f}",
            *_bytes(sent[:, replica], unit, by_kind),
            *_bytes(received[:, replica], unit, by_kind),
            memory.show(held[replica]),
            str(segments),
        )
    return table


def _figures_table(
    title: str, first: tuple[str, str], figures: PlanFigures, by_kind: bool, *, mark: str
) -> Table:
    """A table's head: the columns `first`, then those of loads, bytes, memory and segments."""
    unit = _units(figures.placed.forward.sent, figures.placed.forward.received).name
    held = byte_unit(int(figures.traffic.extra_memory.max())).name
    kinds = (f"Q {unit}", "K, V", "O") if by_kind else (unit,)
    table = _table(title)
    for heading in (
        *first,
        "load\nhome",
        f"\nplanned{mark}",
        *(f"{'' if i else 'sent'}\n{kind}" for i, kind in enumerate(kinds)),
        *(f"{'' if i else 'received'}\n{kind}" for i, kind in enumerate(kinds)),
        f"memory\n{held}{mark}",
        "seg-\nments",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _units(*bytes_by_kind: IntArray) -> ByteUnit:
    """One unit for all bytes of a table."""
    return byte_unit(max(int(kinds.max()) for kinds in bytes_by_kind))


def _bytes(kinds: IntArray, unit: ByteUnit, by_kind: bool) -> list[str]:
    """Cells of one worker's bytes, [3] by kind."""
    return [unit.show(value) for value in (kinds if by_kind else [kinds.sum()])]


def extremes_table(figures: PlanFigures) -> Table:
    """The workers that stand out."""
    plan, moved, traffic = figures.plan, figures.placed.forward, figures.traffic
    before, after = _relative(plan.home_load), _relative(plan.load)
    sent, received = moved.sent.sum(axis=0), moved.received.sum(axis=0)
    workspace = figures.memory.workspace
    table = _table("Extremes")
    table.add_column("")
    table.add_column("worker", justify="right")
    table.add_column("", justify="right", no_wrap=True)
    for name, values, worker, shown in (
        ("heaviest load at home", before, before.argmax(), "{:.3f} x mean"),
        ("heaviest load planned", after, after.argmax(), "{:.3f} x mean"),
        ("lightest load planned", after, after.argmin(), "{:.3f} x mean"),
        ("sends most, forward", sent, sent.argmax(), "bytes"),
        ("receives most, forward", received, received.argmax(), "bytes"),
        ("most extra memory", traffic.extra_memory, traffic.extra_memory.argmax(), "bytes"),
        ("largest workspace", workspace, workspace.argmax(), "bytes"),
        ("most kernel segments", traffic.segments, traffic.segments.argmax(), "{}"),
    ):
        value = values[worker]
        text = show_bytes(value) if shown == "bytes" else shown.format(value)
        table.add_row(name, str(worker), text)
    return table


def placements_table(figures: PlanFigures, *, by_kind: bool = True) -> Table:
    """This plan beside the other placements of the same pool."""
    every = (figures.placed, *figures.others)
    passes = [moved for placed in every for moved in (placed.forward, placed.backward)]
    unit = byte_unit(max(moved.total for moved in passes))
    most = byte_unit(max(max(moved.worst_sent, moved.worst_received) for moved in passes))
    busiest = (f"busiest\nout {most.name}", "\nin")
    table = _table("Placements of this pool")
    for heading in (
        "placement",
        "\nimbalance",
        f"forward\n{unit.name}",
        *(("\nQ", "\nK, V", "\nO") if by_kind else ()),
        *busiest,
        f"backward\n{unit.name}",
        *busiest,
    ):
        left = heading == "placement"
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for placed in every:
        forward, backward = placed.forward, placed.backward
        table.add_row(
            placed.placement,
            f"{placed.imbalance:.4f}",
            unit.show(forward.total),
            *(unit.show(value) for value in (forward.by_kind if by_kind else ())),
            most.show(forward.worst_sent),
            most.show(forward.worst_received),
            unit.show(backward.total),
            most.show(backward.worst_sent),
            most.show(backward.worst_received),
            style="bold" if placed is figures.placed else None,
        )
    return table


def _print_summary(figures: PlanFigures, console: Console) -> None:
    plan, placed, ulysses = figures.plan, figures.placed, figures.ulysses
    if ulysses is None:
        console.print(figures.ulysses_refused, highlight=False, markup=False)
    baseline = f", with Ulysses {ulysses.imbalance:.4f}" if ulysses else ""
    console.print(
        f"Imbalance  at home {imbalance(plan.home_load):.4f}{baseline}, "
        f"planned [bold]{placed.imbalance:.4f}[/]",
        f"Traffic    forward {_traffic(placed.forward)}",
        f"           backward {_traffic(placed.backward)}",
        f"Bound      {_bound(figures)}",
        f"Modelled   a layer forward {_modelled(figures, 'forward', ulysses)}",
        f"           and backward {_modelled(figures, 'backward', ulysses)}",
        sep="\n",
        highlight=False,
    )


def _traffic(moved: Moved) -> str:
    return (
        f"[bold]{show_bytes(moved.total)}[/]; the busiest worker sends "
        f"{show_bytes(moved.worst_sent)} and receives {show_bytes(moved.worst_received)}"
    )


def _bound(figures: PlanFigures) -> str:
    balance = f"a balance within {figures.plan.config.tolerance:g}"
    if figures.bound_ratio is None:
        return f"none known: {balance} may cost no traffic"
    return (
        f"{balance} costs at least {show_bytes(figures.bound)} forward; "
        f"this plan moves [bold]{figures.bound_ratio:.2f}[/] times that"
    )


def _modelled(figures: PlanFigures, direction: Direction, ulysses: Placed | None) -> str:
    line = figures.forward if direction == "forward" else figures.backward
    compute, exposed = float(line.compute.max()), float(line.exposed.max())
    return (
        f"[bold]{show_seconds(line.makespan)}[/]: compute {show_seconds(compute)}, "
        f"exposed at worst {show_seconds(exposed)}" + _ulysses_compute(figures, direction, ulysses)
    )


def _ulysses_compute(figures: PlanFigures, direction: Direction, ulysses: Placed | None) -> str:
    """The baseline's heaviest worker at the same compute rate, its exchange left out."""
    if ulysses is None or ulysses is figures.placed:
        return ""
    flops = pair_flops(figures.plan.heads, direction) * int(ulysses.load.max())
    return f"; Ulysses computes {show_seconds(flops / figures.model.flops_per_second)}"


def _relative(load: IntArray) -> NDArray[np.float64]:
    return np.asarray(load / load.mean(), dtype=np.float64)
