"""The figures of a report, one file an idea: a simulation's JSON in, a `Chart` out."""

from __future__ import annotations

from libra.simulate.report.chart import Chart
from libra.simulate.report.charts.lengths import lengths_chart
from libra.simulate.report.charts.microbatches import microbatches_chart
from libra.simulate.report.charts.packs import packs_chart
from libra.simulate.report.charts.pipeline import pipeline_chart
from libra.simulate.report.charts.pooling import pooling_chart
from libra.simulate.report.charts.scaling import scaling_chart
from libra.simulate.report.charts.schemes import schemes_chart
from libra.simulate.report.charts.tradeoff import tradeoff_chart
from libra.simulate.report.charts.workers import workers_chart
from libra.simulate.report.reading import Record

Section = tuple[str, str, tuple[Chart, ...]]
"""Anchor, title and figures of a part of the report."""


def all_sections(simulation: Record) -> tuple[Section, ...]:
    """Every figure, in the order in which they are read."""
    return (
        ("corpus", "The corpus", (lengths_chart(simulation), packs_chart(simulation))),
        (
            "balance",
            "Balance",
            (
                pooling_chart(simulation),
                workers_chart(simulation),
                tradeoff_chart(simulation),
            ),
        ),
        (
            "speed",
            "Speed",
            (
                schemes_chart(simulation),
                microbatches_chart(simulation),
                scaling_chart(simulation, "fixed_batch"),
                scaling_chart(simulation, "weak"),
                pipeline_chart(simulation),
            ),
        ),
    )


def all_charts(simulation: Record) -> tuple[Chart, ...]:
    return tuple(chart for _, _, charts in all_sections(simulation) for chart in charts)
