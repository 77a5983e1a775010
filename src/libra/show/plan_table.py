"""One pool's plan on a terminal: worker by worker, and beside other placements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from libra.placement import imbalance
from libra.show.choose_pool import ChosenPool
from libra.show.plan_figures import Placed, PlanFigures
from libra.show.units import ByteUnit, byte_unit, show_bytes, show_seconds

IntArray = NDArray[np.int64]

MOST_ROWS = 32
"""Workers that get a row each; of a larger pool every replica does."""
_WIDE = 96
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
    console.print(placements_table(figures))
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
    plan, tally, placed, cp = figures.plan, figures.tally, figures.placed, figures.plan.cp_size
    title = "Workers: loads in means of the pool"
    names = [(str(w // cp) if w % cp == 0 else "", str(w)) for w in range(plan.workers)]
    loads = np.stack([_relative(plan.home_load), _relative(plan.load)])
    held = tally.extra_memory
    table = _figures_table(title, ("replica", "worker"), figures, by_kind, mark="")
    unit, memory = _units(placed.sent, placed.received), byte_unit(int(held.max()))
    for worker, name in enumerate(names):
        table.add_row(
            *name,
            *(f"{load:.3f}" for load in loads[:, worker]),
            *_bytes(placed.sent[:, worker], unit, by_kind),
            *_bytes(placed.received[:, worker], unit, by_kind),
            memory.show(held[worker]),
            str(tally.segments[worker]),
            end_section=worker % cp == cp - 1,
        )
    return table


def replica_table(figures: PlanFigures, *, by_kind: bool = True) -> Table:
    """A row for each replica: means, sums, and maxima where the head says so."""
    plan, tally, placed, cp = figures.plan, figures.tally, figures.placed, figures.plan.cp_size
    title = "Replicas: loads in means of the pool; sums over workers, * the most of one"
    sent, received = (kinds.reshape(3, -1, cp).sum(2) for kinds in (placed.sent, placed.received))
    home = _relative(plan.home_load).reshape(-1, cp).mean(1)
    planned = _relative(plan.load).reshape(-1, cp).max(1)
    held = tally.extra_memory.reshape(-1, cp).max(1)
    table = _figures_table(title, ("replica", "workers"), figures, by_kind, mark="*")
    unit, memory = _units(placed.sent, placed.received), byte_unit(int(held.max()))
    for replica, segments in enumerate(tally.segments.reshape(-1, cp).sum(1)):
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
    unit = _units(figures.placed.sent, figures.placed.received).name
    held = byte_unit(int(figures.tally.extra_memory.max())).name
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
    plan, placed, tally = figures.plan, figures.placed, figures.tally
    before, after = _relative(plan.home_load), _relative(plan.load)
    sent, received = placed.sent.sum(axis=0), placed.received.sum(axis=0)
    table = _table("Extremes")
    table.add_column("")
    table.add_column("worker", justify="right")
    table.add_column("", justify="right", no_wrap=True)
    for name, values, worker, shown in (
        ("heaviest load at home", before, before.argmax(), "{:.3f} x mean"),
        ("heaviest load planned", after, after.argmax(), "{:.3f} x mean"),
        ("lightest load planned", after, after.argmin(), "{:.3f} x mean"),
        ("sends most", sent, sent.argmax(), "bytes"),
        ("receives most", received, received.argmax(), "bytes"),
        ("most extra memory", tally.extra_memory, tally.extra_memory.argmax(), "bytes"),
        ("most kernel segments", tally.segments, tally.segments.argmax(), "{}"),
    ):
        value = values[worker]
        text = show_bytes(value) if shown == "bytes" else shown.format(value)
        table.add_row(name, str(worker), text)
    return table


def placements_table(figures: PlanFigures) -> Table:
    """This plan beside the other placements of the same pool."""
    every = (figures.placed, *figures.others)
    unit = byte_unit(max(int(placed.traffic.sum()) for placed in every))
    most = byte_unit(max(max(placed.worst_sent, placed.worst_received) for placed in every))
    table = _table("Placements of this pool, forward")
    for heading in (
        "placement",
        "\nimbalance",
        f"traffic\n{unit.name}",
        "\nQ",
        "\nK, V",
        "\nO",
        f"worst worker\nsends {most.name}",
        "\nreceives",
    ):
        left = heading == "placement"
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for placed in every:
        table.add_row(
            placed.placement,
            f"{placed.imbalance:.4f}",
            unit.show(placed.traffic.sum()),
            *(unit.show(value) for value in placed.traffic),
            most.show(placed.worst_sent),
            most.show(placed.worst_received),
            style="bold" if placed is figures.placed else None,
        )
    return table


def _print_summary(figures: PlanFigures, console: Console) -> None:
    plan, placed, line = figures.plan, figures.placed, figures.timeline
    ulysses = figures.ulysses
    if ulysses is None:
        console.print(figures.ulysses_refused, highlight=False, markup=False)
    baseline = f", with Ulysses {ulysses.imbalance:.4f}" if ulysses else ""
    console.print(
        f"Imbalance  at home {imbalance(plan.home_load):.4f}{baseline}, "
        f"planned [bold]{placed.imbalance:.4f}[/]",
        f"Traffic    [bold]{show_bytes(placed.traffic.sum())}[/] forward; the worst worker sends "
        f"{show_bytes(placed.worst_sent)} and receives {show_bytes(placed.worst_received)}",
        f"Modelled   [bold]{show_seconds(line.makespan)}[/] a layer forward; compute "
        f"{show_seconds(float(line.compute.max()))}, exposed at worst "
        f"{show_seconds(float(line.exposed.max()))}" + _ulysses_compute(figures, ulysses),
        sep="\n",
        highlight=False,
    )


def _ulysses_compute(figures: PlanFigures, ulysses: Placed | None) -> str:
    """The baseline's heaviest worker at the same compute rate, its exchange left out."""
    if ulysses is None or ulysses is figures.placed:
        return ""
    heads = figures.plan.heads
    flops = 2 * (heads.dim + heads.value_dim) * int(ulysses.load.max())
    return f"; Ulysses computes {show_seconds(flops / figures.model.flops_per_second)}"


def _relative(load: IntArray) -> NDArray[np.float64]:
    return np.asarray(load / load.mean(), dtype=np.float64)
