"""How long the samples are, and which lengths the attention's cost comes from."""

from __future__ import annotations

import math
from itertools import pairwise

from libra.simulate.report.chart import Axis, Heading, Series, Table, XYChart
from libra.simulate.report.reading import Record, known, number, numbers, record
from libra.simulate.report.spelling import percent, percent_tick, shown, tokens

_NARROWEST = 1 / 3
"""Doublings of length that a bin spans at least: finer ones are joined."""


def lengths_chart(simulation: Record) -> XYChart:
    corpus = record(simulation.get("corpus"))
    histogram = record(corpus.get("histogram"))
    edges = [edge for edge in numbers(histogram.get("edges")) if edge is not None and edge > 0]
    columns = [numbers(histogram.get(name)) for name in ("samples", "tokens", "squares")]
    joined, shares = _join(edges, columns)
    bins = list(pairwise(joined))
    densities = [
        tuple(
            None if total is None else total / math.log2(high / low)
            for total, (low, high) in zip(column, bins, strict=False)
        )
        for column in shares
    ]
    names = (
        ("samples", "samples", True),
        ("tokens", "tokens", False),
        ("cost", "attention cost", True),
    )
    return XYChart(
        heading=Heading(
            key="lengths",
            title="Sample lengths",
            finding=_finding(corpus, joined, shares),
            caption=(
                "Each curve spreads 100% over the lengths: the area under a stretch of it is the "
                "share of samples, tokens or attention cost (squared length) that those lengths "
                "hold. The further the cost lies to the right of the samples, the heavier the tail."
            ),
            empty="The simulation holds no histogram of lengths.",
        ),
        x=Axis(
            label="sample length, tokens",
            scale="log",
            spell=tokens,
            ticks=tuple(float(1 << power) for power in range(0, 40, 2)),
            low=joined[0] if joined else None,
            high=joined[-1] if joined else None,
        ),
        y=Axis(label="share per doubling of length", spell=percent_tick, switch=True),
        series=tuple(
            Series(look=look, label=label, kind="steps", x=tuple(joined), y=density, filled=filled)
            for (look, label, filled), density in zip(names, densities, strict=True)
            if known(density)
        ),
        table=Table(
            headings=("length, tokens", "samples", "tokens", "attention cost"),
            rows=tuple(
                (
                    f"{low:,.0f} to {max(high - 1, low):,.0f}",
                    *(shown(column[i] if i < len(column) else None, percent) for column in shares),
                )
                for i, (low, high) in enumerate(bins)
            ),
        ),
        anchors=tuple(math.sqrt(low * high) for low, high in bins),
    )


def _join(
    edges: list[float], columns: list[list[float | None]]
) -> tuple[list[float], list[list[float | None]]]:
    """Bins without the empty ends, joined to a third of a doubling; shares of one in each."""
    count = len(edges) - 1
    if count < 1 or any(high <= low for low, high in pairwise(edges)):
        return [], [[], [], []]
    filled = [i for column in columns for i, value in enumerate(column[:count]) if value]
    if not filled:
        return [], [[], [], []]
    first, last = min(filled), max(filled)
    joined, groups = [edges[first]], [[first]]
    for i in range(first, last + 1):
        if i not in groups[-1]:
            groups[-1].append(i)
        wide = math.log2(edges[i + 1] / joined[-1]) >= _NARROWEST - 1e-9
        if wide or i == last:
            joined.append(edges[i + 1])
            if i < last:
                groups.append([i + 1])
    shares = []
    for column in columns:
        total = sum(known(column[:count]))
        shares.append(
            [sum(known([column[i] for i in group if i < len(column)])) / total for group in groups]
            if total > 0
            else []
        )
    return joined, [list(column) for column in shares]


def _finding(corpus: Record, edges: list[float], shares: list[list[float | None]]) -> str:
    """Where half the cost lies."""
    median, longest = number(corpus.get("median")), number(corpus.get("longest"))
    said = []
    if median is not None and longest is not None:
        said.append(
            f"Half of the samples have at most {median:,.0f} tokens; the longest has "
            f"{longest:,.0f}."
        )
    if len(shares) == 3 and shares[0] and shares[2]:
        run, start = 0.0, len(shares[2])
        while start > 0 and run < 0.5:
            start -= 1
            run += shares[2][start] or 0.0
        few = sum(known(shares[0][start:]))
        said.append(
            f"Samples of {tokens(edges[start])} tokens and more are {percent(few)} of all and "
            f"{percent(run)} of the attention cost."
        )
    return " ".join(said)
