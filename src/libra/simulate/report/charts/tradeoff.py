"""What balance costs in traffic, candidate by candidate."""

from __future__ import annotations

from libra.simulate.report.chart import Axis, Heading, Note, Scale, Series, Table, XYChart
from libra.simulate.report.looks import group_look
from libra.simulate.report.reading import Number, Record, number, record, records
from libra.simulate.report.spelling import (
    digits,
    percent,
    percent_tick,
    seconds,
    shown,
    three,
    tokens,
)


def tradeoff_chart(simulation: Record) -> XYChart:
    candidates = records(simulation.get("candidates"))
    chosen = number(record(simulation.get("recommendation")).get("candidate"))
    placed = [
        (i, row, traffic, overall)
        for i, row in enumerate(candidates)
        if (traffic := number(row.get("gigabytes"))) is not None
        and (overall := overall_imbalance(row)) is not None
    ]
    sizes = sorted({number(row.get("pool_size")) or 0.0 for _, row, _, _ in placed})
    series = []
    for rank, size in enumerate(sizes):
        mine = [
            (at, row, traffic, overall)
            for at, (_, row, traffic, overall) in enumerate(placed)
            if (number(row.get("pool_size")) or 0.0) == size
        ]
        series.append(
            Series(
                look=group_look(rank),
                label=f"P = {size:.0f}" if size else "P unknown",
                kind="points",
                x=tuple(traffic for _, _, traffic, _ in mine),
                y=tuple(overall for _, _, _, overall in mine),
                faint=tuple(row.get("fits") is False for _, row, _, _ in mine),
                anchors=tuple(at for at, _, _, _ in mine),
            )
        )
    best = next((entry for entry in placed if entry[0] == chosen), None)
    notes: tuple[Note, ...] = ()
    if best is not None:
        notes = (Note(x=best[2], y=best[3], text="recommended", ring=True),)
    return XYChart(
        heading=Heading(
            key="tradeoff",
            title="Balance against traffic",
            finding=_finding(best),
            caption=(
                "One mark a candidate. To the left it moves fewer bytes, further down its workers "
                "are more equal: the best lie in the lower left corner. Hollow marks exceed the "
                "memory cap; the ring marks the recommended one. Imbalance is the slowest worker "
                "over the mean, − 1, pools and the inside of pools together."
            ),
            empty="No candidate has both a traffic and an imbalance.",
        ),
        x=Axis(label="traffic of a pool per layer, forward, GB", low=0.0, high=_room(placed)),
        y=Axis(
            label="imbalance of the workers", scale=_scale(placed), spell=percent_tick, switch=True
        ),
        series=tuple(series),
        table=Table(
            headings=("candidate", "traffic, GB", "imbalance", "step"),
            rows=tuple(
                (
                    candidate_name(row) + (" (recommended)" if i == chosen else ""),
                    three(traffic),
                    percent(overall),
                    shown(number(row.get("step_seconds")), seconds),
                )
                for i, row, traffic, overall in placed
            ),
        ),
        notes=notes,
    )


def candidate_name(row: Record) -> str:
    """`P = 8, B = 4K, H = 1`, of what is known."""
    parts = (("P", "pool_size", digits), ("B", "block_size", tokens), ("H", "head_shards", digits))
    return ", ".join(
        f"{letter} = {spell(value)}"
        for letter, name, spell in parts
        if (value := number(row.get(name))) is not None
    )


def overall_imbalance(row: Record) -> Number:
    """Between pools and inside one, multiplied; either alone where the other is missing."""
    between, within = number(row.get("after")), number(row.get("intra_mean"))
    if between is None and within is None:
        return None
    return max((1 + (between or 0.0)) * (1 + (within or 0.0)) - 1, 0.0)


def _room(placed: list[tuple[int, Record, float, float]]) -> Number:
    most = max((traffic for _, _, traffic, _ in placed), default=0.0)
    return 1.06 * most if most > 0 else None


def _scale(placed: list[tuple[int, Record, float, float]]) -> Scale:
    """Logarithmic where candidates are orders of magnitude apart."""
    heights = [overall for _, _, _, overall in placed]
    far = bool(heights) and min(heights) > 0 and max(heights) > 10 * min(heights)
    return "log" if far else "linear"


def _finding(best: tuple[int, Record, float, float] | None) -> str:
    if best is None:
        return ""
    _, row, traffic, overall = best
    return (
        f"The recommended {candidate_name(row)} leaves the slowest worker {percent(overall)} above "
        f"the mean and moves {digits(traffic)} GB a layer."
    )
