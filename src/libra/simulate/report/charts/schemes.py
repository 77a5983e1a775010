"""A step's time in each scheme, and what it is made of."""

from __future__ import annotations

from libra.simulate.report.chart import Axis, Heading, Row, RowChart, Table
from libra.simulate.report.reading import Number, Record, number, records, words
from libra.simulate.report.spelling import NONE, digits, seconds, shown, times

_PARTS = (
    ("attention", "attention"),
    ("exposed", "exposed transfers"),
    ("other", "all other work"),
)


def schemes_chart(simulation: Record) -> RowChart:
    schemes = records(simulation.get("schemes"))
    rows = []
    for scheme in schemes:
        step = number(scheme.get("step_seconds"))
        parts = tuple(_length(scheme.get(f"{name}_seconds")) for name, _ in _PARTS)
        if step is not None and not any(part is not None for part in parts):
            parts = (None, None, step)  # not divided: one bar all the same
        speedup = number(scheme.get("speedup"))
        note = shown(step, seconds) + (f", {times(speedup)}" if speedup is not None else "")
        rows.append(Row(label=_label(scheme), values=parts, notes=(note,)))
    return RowChart(
        heading=Heading(
            key="schemes",
            title="One step, scheme by scheme",
            finding=_finding(schemes),
            caption=(
                "Predicted time of an optimizer step and its parts: attention of the slowest "
                "worker (waiting for it included), transfers that no compute hides (striped), and "
                "everything else. The number at the end is the whole step and the speedup over "
                "Ulysses."
            ),
            empty="No schemes were compared.",
        ),
        x=Axis(label="seconds of a step", spell=digits),
        parts=_PARTS,
        rows=tuple(rows),
        stacked=True,
        table=Table(
            headings=(
                "scheme",
                "step",
                "attention",
                "exposed transfers",
                "all other work",
                "speedup",
                "slowest GA index",
                "mean GA index",
            ),
            rows=tuple(
                (
                    _label(scheme),
                    *(
                        shown(number(scheme.get(f"{name}_seconds")), seconds)
                        for name in ("step", "attention", "exposed", "other")
                    ),
                    shown(number(scheme.get("speedup")), times),
                    *(
                        shown(number(scheme.get(name)), digits)
                        for name in ("worst_index", "mean_index")
                    ),
                )
                for scheme in schemes
            ),
        ),
    )


def _label(scheme: Record) -> str:
    return words(scheme.get("label")) or words(scheme.get("key")) or NONE


def _length(value: object) -> Number:
    """A bar has no negative length."""
    found = number(value)
    return None if found is None else max(found, 0.0)


def _finding(schemes: list[Record]) -> str:
    steps = {
        words(row.get("key")): step
        for row in schemes
        if (step := number(row.get("step_seconds"))) is not None and step > 0
    }
    if "ulysses" not in steps or "libra" not in steps:
        return ""
    said = f"Libra steps {times(steps['ulysses'] / steps['libra'])} as fast as Ulysses"
    if "ideal" in steps:
        said += f" and at {100 * steps['ideal'] / steps['libra']:.0f}% of the ideal speed"
    return said + "."
