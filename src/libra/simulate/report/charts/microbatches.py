"""How long microbatches take: the spread is what pipelines and synchronisation wait for."""

from __future__ import annotations

from itertools import pairwise

from libra.simulate.report.chart import Axis, Heading, Series, Table, XYChart
from libra.simulate.report.charts.labels import scheme_labels
from libra.simulate.report.reading import Number, Record, known, numbers, record, words
from libra.simulate.report.spelling import digits, percent, percent_tick, seconds, shown


def microbatches_chart(simulation: Record) -> XYChart:
    held = record(simulation.get("microbatches"))
    edges = _rising(numbers(held.get("edges")))
    bins = list(pairwise(edges))
    labels = scheme_labels(simulation)
    counts = {words(key): numbers(value) for key, value in record(held.get("counts")).items()}
    keys = [
        *(key for key in labels if key in counts),
        *(key for key in counts if key not in labels),
    ]
    shares = {key: _shares(counts[key], len(bins)) for key in keys}
    keys = [key for key in keys if known(shares[key])]
    return XYChart(
        heading=Heading(
            key="microbatches",
            title="Time of a microbatch",
            finding=_finding(bins, shares, labels),
            caption=(
                "Share of microbatches by how long they take, forward and backward. A narrow peak "
                "is what pipelines and gradient synchronisation want; everything waits for the far "
                "right end."
            ),
            empty="No microbatches were timed.",
        ),
        x=Axis(
            label="seconds of a microbatch", spell=digits, low=_end(edges, 0), high=_end(edges, -1)
        ),
        y=Axis(label="share of the microbatches", spell=percent_tick, switch=True),
        series=tuple(
            Series(
                look=key,
                label=labels.get(key, key),
                kind="steps",
                x=tuple(edges),
                y=shares[key],
                filled=True,
            )
            for key in keys
        ),
        table=Table(
            headings=("time", *(labels.get(key, key) for key in keys)),
            rows=tuple(
                (
                    f"{seconds(low)} to {seconds(high)}",
                    *(shown(shares[key][i], percent) for key in keys),
                )
                for i, (low, high) in enumerate(bins)
            ),
        ),
        anchors=tuple((low + high) / 2 for low, high in bins),
    )


def _rising(edges: list[Number]) -> list[float]:
    """Bins have no place where an edge is missing or out of order: none of them, then."""
    found = known(edges)
    in_order = all(low < high for low, high in pairwise(found))
    return found if len(found) == len(edges) and in_order else []


def _end(edges: list[float], index: int) -> Number:
    return edges[index] if edges else None


def _shares(counts: list[Number], bins: int) -> tuple[Number, ...]:
    """Of one, exactly one a bin."""
    padded = (counts + [None] * bins)[:bins]
    total = sum(known(padded))
    return tuple(None if value is None or total <= 0 else value / total for value in padded)


def _finding(
    bins: list[tuple[float, float]],
    shares: dict[str, tuple[Number, ...]],
    labels: dict[str, str],
) -> str:
    said = []
    for key in ("ulysses", "libra"):
        taken = [
            (low, high)
            for (low, high), share in zip(bins, shares.get(key, ()), strict=False)
            if share
        ]
        if taken:
            said.append(f"{labels[key]}: {seconds(taken[0][0])} to {seconds(taken[-1][1])}")
    return f"From the fastest to the slowest, {'; '.join(said)}." if said else ""
