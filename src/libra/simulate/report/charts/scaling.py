"""Predicted throughput against the number of replicas: the same batch for all, or a growing one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from libra.simulate.report.chart import Axis, Heading, Series, Table, XYChart
from libra.simulate.report.charts.labels import scheme_labels
from libra.simulate.report.reading import Number, Record, number, record, records
from libra.simulate.report.spelling import count, digits, percent, short, shown

Way = Literal["fixed_batch", "weak"]
_TITLES = {"fixed_batch": "Strong scaling, fixed batch", "weak": "Weak scaling"}
_CAPTIONS = {
    "fixed_batch": (
        "Throughput as replicas are added and the global batch stays. A level line is perfect "
        "scaling; a curve that falls has replicas that wait for the slowest one, or fewer packs "
        "each than balance needs. The table has the whole cluster's throughput and the efficiency."
    ),
    "weak": (
        "Throughput as the global batch grows with the replicas. A level line is perfect scaling. "
        "The more replicas, the heavier the heaviest pack among them: the gap between the curves "
        "is what waiting for it costs."
    ),
}


def scaling_chart(simulation: Record, way: Way) -> XYChart:
    rows = sorted(
        (
            (dp, row)
            for row in records(record(simulation.get("scaling")).get(way))
            if (dp := number(row.get("dp"))) is not None and dp > 0
        ),
        key=lambda pair: pair[0],
    )
    sizes = tuple(dp for dp, _ in rows)
    labels = scheme_labels(simulation)
    seen = {key for _, row in rows for key in record(row.get("tokens_per_second"))}
    keys = [*(key for key in labels if key in seen), *sorted(seen - set(labels))]
    divisors = [number(row.get("gpus")) or None for _, row in rows]
    each = "GPU" if all(divisors) else "replica"
    shares = list(sizes) if None in divisors else divisors
    rates = {key: tuple(_of(row, "tokens_per_second", key) for _, row in rows) for key in keys}
    return XYChart(
        heading=Heading(
            key=f"scaling-{way.replace('_', '-')}",
            title=_TITLES[way],
            finding=_finding(sizes, rates),
            caption=_CAPTIONS[way],
            empty="No scaling was predicted.",
        ),
        x=Axis(label="data-parallel replicas, DP", scale="log", spell=count, ticks=sizes or None),
        y=Axis(label=f"tokens per second and {each}", low=0.0, spell=short, switch=True),
        series=tuple(
            Series(
                look=key,
                label=labels.get(key, key),
                kind="line",
                x=sizes,
                y=_over(rates[key], shares),
            )
            for key in keys
        ),
        table=Table(
            headings=("DP", "GPUs", *(labels.get(key, key) for key in keys)),
            rows=tuple(
                (
                    count(dp),
                    shown(number(row.get("gpus")), count),
                    *(_cell(row, key) for key in keys),
                )
                for dp, row in rows
            ),
        ),
        anchors=sizes,
    )


def _over(rates: tuple[Number, ...], shares: Sequence[Number]) -> tuple[Number, ...]:
    return tuple(
        None if rate is None or not share else rate / share
        for rate, share in zip(rates, shares, strict=True)
    )


def _of(row: Record, name: str, key: str) -> Number:
    return number(record(row.get(name)).get(key))


def _cell(row: Record, key: str) -> str:
    """The rate, and the efficiency behind it where that is known."""
    rate, efficiency = _of(row, "tokens_per_second", key), _of(row, "efficiency", key)
    said = shown(rate, short)
    return said if efficiency is None else f"{said} ({percent(efficiency)})"


def _finding(sizes: tuple[float, ...], rates: dict[str, tuple[Number, ...]]) -> str:
    for i in reversed(range(len(sizes))):
        before, after = (rates.get(key, ())[i : i + 1] for key in ("ulysses", "libra"))
        if before and after and before[0] and after[0] is not None:
            return (
                f"At DP = {sizes[i]:.0f} Libra trains {digits(after[0] / before[0])} times as fast "
                "as Ulysses."
            )
    return ""
