"""What a figure shows, apart from how it is drawn: the SVG of the report and matplotlib read this.

A chart has one table: what a screen reader, a printed page or a doubtful reader looks at, and where
the tooltips get their words.  Row `i` of the table belongs to anchor `i` of the chart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from libra.simulate.report.reading import Number
from libra.simulate.report.spelling import digits

Scale = Literal["linear", "log"]
Kind = Literal["line", "steps", "bars", "points", "rule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as shown; the first column names the row."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    label: str
    """What is measured, with its unit."""

    scale: Scale = "linear"
    spell: Callable[[float], str] = digits
    ticks: tuple[float, ...] | None = None
    """Where to mark the axis; None for round numbers."""

    low: Number = None
    high: Number = None
    """Ends of the axis; None for what the data needs."""

    switch: bool = False
    """Whether the reader may choose between a linear and a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, outline, set of bars or of marks, or (`rule`) a horizontal line at `y[0]`."""

    look: str
    """Key in `looks`: colour, dash, mark."""

    label: str
    kind: Kind
    x: tuple[Number, ...] = ()
    """Places of the values; for `steps` and `bars` the n + 1 edges of n values."""

    y: tuple[Number, ...] = ()
    filled: bool = False
    faint: tuple[bool, ...] = ()
    """Of `points`: which are drawn hollow."""

    anchors: tuple[int, ...] = ()
    """Of `points`: the table's row of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A word at a place of the chart; `ring` circles the place."""

    x: float
    y: float
    text: str
    ring: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What all figures have."""

    key: str
    """Name of the file and of the anchor on the page."""

    title: str
    finding: str = ""
    """What the figure says, in one sentence made from its numbers."""

    caption: str
    """How to read it."""

    empty: str
    """What to say where there is nothing to draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XYChart:
    heading: Heading
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    table: Table
    anchors: tuple[Number, ...] = ()
    """x of each row of the table, where tooltips point; empty for `points`: they have their own."""

    notes: tuple[Note, ...] = ()

    @property
    def drawable(self) -> bool:
        return any(
            value is not None and series.kind != "rule"
            for series in self.series
            for value in series.y
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    label: str
    values: tuple[Number, ...]
    """One for each part of the chart."""

    notes: tuple[str, ...] = ()
    """Words at the end of the bar; of each bar, where they stand below each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChart:
    """Horizontal bars: the parts of a row end to end (`stacked`) or below each other."""

    heading: Heading
    x: Axis
    parts: tuple[tuple[str, str], ...]
    """Look and label of each."""

    rows: tuple[Row, ...]
    stacked: bool
    table: Table

    @property
    def drawable(self) -> bool:
        return any(value is not None for row in self.rows for value in row.values)


Chart = XYChart | RowChart
