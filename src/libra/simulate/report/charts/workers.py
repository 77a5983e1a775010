"""Loads of the workers of one pool, before and after tiles move."""

from __future__ import annotations

from libra.simulate.report.chart import Axis, Heading, Series, Table, XYChart
from libra.simulate.report.reading import Number, Record, known, numbers, record, words
from libra.simulate.report.spelling import count, digits, percent, shown

MOST_BARS = 384
"""More workers than these share bars."""


def workers_chart(simulation: Record) -> XYChart:
    workers = record(simulation.get("workers"))
    columns = [numbers(workers.get("before")), numbers(workers.get("after"))]
    total = max(len(column) for column in columns)
    each = -(-total // MOST_BARS) if total else 1
    before, after = (_heaviest(column, each) for column in columns)
    bars = max(len(before), len(after))
    edges = tuple(i - 0.5 for i in range(bars + 1))
    joined = f" Each bar is the heaviest of {each} neighbouring workers." if each > 1 else ""
    title = words(workers.get("title"))
    return XYChart(
        heading=Heading(
            key="workers",
            title="Load of each worker",
            finding=_finding(*columns),
            caption=(
                (f"{title}. " if title else "")
                + "A bar is one worker of the pool; the line at 1 is the mean, and the pool is as "
                "slow as its tallest bar. Before, each replica attends to its own pack, divided "
                "evenly over its context-parallel workers; after, tiles have moved." + joined
            ),
            empty="The simulation holds no loads of workers.",
        ),
        x=Axis(
            label="worker" if each == 1 else f"worker / {each}",
            spell=count,
            low=edges[0] if bars else None,
            high=edges[-1] if bars else None,
        ),
        y=Axis(label="load over the mean", spell=digits),
        series=(
            Series(look="before", label="before", kind="steps", x=edges, y=before, filled=True),
            Series(look="after", label="after", kind="bars", x=edges, y=after),
            Series(look="mean", label="mean", kind="rule", y=(1.0,)),
        ),
        table=Table(
            headings=("worker", "before", "after"),
            rows=tuple(
                (_name(i, each, total), _shown(before, i), _shown(after, i)) for i in range(bars)
            ),
        ),
        anchors=tuple(float(i) for i in range(bars)),
    )


def _heaviest(column: list[Number], each: int) -> tuple[Number, ...]:
    return tuple(
        max(known(column[i : i + each]), default=None) for i in range(0, len(column), each)
    )


def _name(index: int, each: int, total: int) -> str:
    last = min((index + 1) * each, total) - 1
    return str(index) if each == 1 else f"{index * each} to {last}"


def _shown(column: tuple[Number, ...], index: int) -> str:
    return shown(column[index] if index < len(column) else None, digits)


def _finding(before: list[Number], after: list[Number]) -> str:
    said = []
    for name, column in (("before", before), ("after", after)):
        loads = known(column)
        mean = sum(loads) / len(loads) if loads else 0.0
        if mean > 0:
            said.append(f"{percent(max(max(loads) / mean - 1, 0.0))} above the mean {name}")
    return f"The busiest worker is {', '.join(said)}." if said else ""
