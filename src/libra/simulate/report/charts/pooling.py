"""How unequal pools are, against their size: the law of large numbers, and better than it."""

from __future__ import annotations

from libra.simulate.report.chart import Axis, Heading, Series, Table, XYChart
from libra.simulate.report.reading import Number, Record, number, record, records
from libra.simulate.report.spelling import count, percent, percent_tick, shown

_COLUMNS = (
    ("before", "before", "in the sampler's order"),
    ("random", "random", "random grouping"),
    ("theory", "theory", "theory"),
    ("after_greedy", "greedy", "VRSP, greedy"),
    ("after", "after", "VRSP, refined"),
    ("bound", "bound", "bound"),
)


def pooling_chart(simulation: Record) -> XYChart:
    rows = sorted(
        ((size, row) for row in records(simulation.get("pooling")) if (size := _size(row))),
        key=lambda pair: pair[0],
    )
    sizes = tuple(size for size, _ in rows)
    values: dict[str, tuple[Number, ...]] = {
        name: tuple(_not_negative(row.get(name)) for _, row in rows) for name, _, _ in _COLUMNS
    }
    present = [column for column in _COLUMNS if any(v is not None for v in values[column[0]])]
    return XYChart(
        heading=Heading(
            key="pooling",
            title="Imbalance between pools",
            finding=_finding(simulation, sizes, values),
            caption=(
                "How far the heaviest pool of a window lies above the mean, against the number of "
                "replicas that share a pool. Chance alone falls slowly, as the dashed theory says "
                "(1 + CV / √P · √(2 ln K) with K pools); placing packs by their workload falls at "
                "once, down to the bound that single heavy packs set. Lower is better. A zero has "
                "no place on a logarithmic scale."
            ),
            empty="No pool sizes were compared.",
        ),
        x=Axis(label="replicas in a pool, P", scale="log", spell=count, ticks=sizes or None),
        y=Axis(
            label="heaviest pool over the mean, − 1", scale="log", spell=percent_tick, switch=True
        ),
        series=tuple(
            Series(look=look, label=label, kind="line", x=sizes, y=values[name])
            for name, look, label in present
        ),
        table=Table(
            headings=("P", *(label for _, _, label in present)),
            rows=tuple(
                (count(size), *(shown(values[name][i], percent) for name, _, _ in present))
                for i, size in enumerate(sizes)
            ),
        ),
        anchors=sizes,
    )


def _size(row: Record) -> Number:
    found = number(row.get("pool_size"))
    return found if found is not None and found > 0 else None


def _not_negative(value: object) -> Number:
    """Rounding may leave a balanced pool a hair below zero."""
    found = number(value)
    return None if found is None else max(found, 0.0)


def _finding(
    simulation: Record, sizes: tuple[float, ...], values: dict[str, tuple[Number, ...]]
) -> str:
    """Before and after at the recommended pool size, or at the largest with both."""
    both = {
        size: (before, after)
        for size, before, after in zip(sizes, values["before"], values["after"], strict=True)
        if before is not None and after is not None
    }
    if not both:
        return ""
    chosen = number(record(simulation.get("recommendation")).get("candidate"))
    candidates = records(simulation.get("candidates"))
    wanted = None
    if chosen is not None and 0 <= chosen < len(candidates):
        wanted = number(candidates[int(chosen)].get("pool_size"))
    size = wanted if wanted in both else max(both)
    assert size is not None
    before, after = both[size]
    return (
        f"At P = {size:.0f}, VRSP brings the heaviest pool from {percent(before)} above the mean "
        f"to {percent(after)}."
    )
