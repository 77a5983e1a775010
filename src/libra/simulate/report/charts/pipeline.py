"""How much of a pipeline's time its stages stand idle."""

from __future__ import annotations

from libra.simulate.report.chart import Axis, Heading, Row, RowChart, Table
from libra.simulate.report.charts.labels import scheme_labels
from libra.simulate.report.reading import Record, number, record, records, words
from libra.simulate.report.spelling import NONE, count, percent, percent_tick, shown

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved"}


def pipeline_chart(simulation: Record) -> RowChart:
    schedules = records(simulation.get("pipeline"))
    labels = scheme_labels(simulation)
    seen = [key for row in schedules for key in record(row.get("bubble"))]
    keys = [
        *(key for key in labels if key in seen),
        *dict.fromkeys(k for k in seen if k not in labels),
    ]
    rows = []
    for row in schedules:
        bubbles = tuple(number(record(row.get("bubble")).get(key)) for key in keys)
        rows.append(
            Row(
                label=_label(row),
                values=tuple(None if b is None else min(max(b, 0.0), 1.0) for b in bubbles),
                notes=tuple(shown(b, percent) for b in bubbles),
            )
        )
    return RowChart(
        heading=Heading(
            key="pipeline",
            title="Pipeline bubbles",
            finding=_finding(schedules),
            caption=(
                "Share of the time in which pipeline stages stand idle, for each schedule with its "
                "number of stages × microbatches. Some idle time belongs to the schedule "
                "(ideal: all microbatches equal); what lies above it comes from microbatches of "
                "unequal length. Shorter is better."
            ),
            empty="No pipeline was simulated, as for a configuration of one stage.",
        ),
        x=Axis(label="idle share of the stages' time", spell=percent_tick),
        parts=tuple((key, labels.get(key, key)) for key in keys),
        rows=tuple(rows),
        stacked=False,
        table=Table(
            headings=("schedule", *(labels.get(key, key) for key in keys)),
            rows=tuple((row.label, *row.notes) for row in rows),
        ),
    )


def _label(row: Record) -> str:
    name = words(row.get("schedule"))
    stages, microbatches = number(row.get("stages")), number(row.get("microbatches"))
    said = _SCHEDULES.get(name, name) or NONE
    return f"{said}, {shown(stages, count)} × {shown(microbatches, count)}"


def _finding(schedules: list[Record]) -> str:
    for row in schedules:
        bubble = record(row.get("bubble"))
        before, after = number(bubble.get("ulysses")), number(bubble.get("libra"))
        if before is not None and after is not None:
            return (
                f"{_label(row)}: stages stand idle {percent(before)} of the time with Ulysses, "
                f"{percent(after)} with Libra."
            )
    return ""
