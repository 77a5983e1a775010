"""The look of every chart, and the parts that charts share.

    Figure ──┬── page_spec ──> the report: as wide as its box, drawn by Vega in the browser
             └── picture   ──> SVG and PNG: a fixed width, and the title above the chart

The colours of series stand out by at least 3:1 from white and from the dark page alike, so one
specification serves both.  In the dark page a style sheet lightens text and grid lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import altair as alt
import numpy as np
import vl_convert
from numpy.typing import NDArray

from libra.simulate.results import plain_json

BLUE: Final = "#2b7fd0"
ORANGE: Final = "#d0650f"
GREEN: Final = "#14876a"
PINK: Final = "#b8559b"
OLIVE: Final = "#8f7d12"
TEAL: Final = "#2a8f9d"
GREY: Final = "#7a8592"
INK: Final = "#2c333b"
"""Colour of text, which the dark page replaces."""

_LABELS: Final = {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12}
CONFIG: Final[dict[str, Any]] = {
    "font": "Helvetica, Arial, Liberation Sans, sans-serif",
    "background": "transparent",
    "view": {"stroke": None},
    # Labels that would touch are left out.
    "axis": _LABELS
    | {"domainColor": GREY, "tickColor": GREY, "gridColor": "#e4e8ed", "titleFontWeight": "normal"}
    | {"titlePadding": 8, "labelOverlap": "greedy"},
    "axisX": {"labelSeparation": 10, "tickCount": {"expr": "max(3, round(width / 90))"}}
    | {"grid": False},
    "axisY": {"labelSeparation": 4, "tickCount": 6, "domain": False, "ticks": False},
    "legend": _LABELS | {"orient": "top", "title": None, "labelLimit": 220, "columnPadding": 18},
    "title": {"anchor": "start", "frame": "group", "color": INK, "fontSize": 16, "offset": 14},
    "text": {"color": INK, "fontSize": 12.5},
    "bar": {"cornerRadiusEnd": 2},
}
PICTURE: Final = {"background": "white", "padding": 20}
"""A picture brings its own background, so that it reads well on dark pages too."""
_PICTURE_WIDTH: Final = 720
_COLUMNS: Final = alt.ExprRef("max(1, floor(width / 165))")
"""As many columns of a legend as the width has room for."""

Data = Iterable[Mapping[str, Any]]
Table = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
"""Headings and rows of the numbers of a figure, as text with units."""


class Look(NamedTuple):
    """Name of a series, its colour, and the dashes of its line."""

    label: str
    colour: str
    dash: tuple[int, ...] = (1, 0)


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title and its numbers."""

    key: str
    """Anchor in the page, and name of the picture's file."""
    title: str
    headings: tuple[str, ...]
    """Column headings of the numbers."""
    rows: tuple[tuple[str, ...], ...]
    """The numbers as text with units."""
    chart: alt.TopLevelMixin

    @property
    def page_spec(self) -> dict[str, Any]:
        """Specification for the page, whose script sets the width to that of the chart's box."""
        autosize = {"type": "fit-x", "contains": "padding"}
        return chart_spec(self.chart) | {"autosize": autosize, "description": self.title}

    @property
    def picture(self) -> dict[str, Any]:
        """Specification that stands on its own."""
        return chart_spec(self.chart.properties(width=_PICTURE_WIDTH, title=self.title)) | PICTURE


def chart_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart as Vega-Lite with this look, without the address of its schema."""
    spec: dict[str, Any] = plain_json(chart.to_dict())
    del spec["$schema"]
    return spec | {"config": CONFIG}


def draw_svg(spec: Mapping[str, Any]) -> str:
    """The chart as SVG, without labels for screen readers on every single mark.

    The same specification gives the same bytes: Vega numbers ids on from one drawing to the next,
    so they are numbered again here.
    """
    # An id is clip1 in the first drawing of a process and clip5 in the next.
    svg = vl_convert.vegalite_to_svg({**spec, "config": {**spec["config"], "aria": False}})
    ids = list(dict.fromkeys(re.findall(r'id="(\w+)"', svg)))
    return re.sub(r'(id="|url\(#)(\w+)', lambda m: f"{m[1]}part{ids.index(m[2])}", svg)


def save_picture(spec: Mapping[str, Any], *paths: Path) -> None:
    """Write SVG or PNG by the suffix of each path.  OSError where that cannot be done."""
    svg = draw_svg(spec)
    for path in paths:
        is_svg = path.suffix == ".svg"
        path.write_bytes(svg.encode() if is_svg else vl_convert.svg_to_png(svg, scale=2.0))


def plot(rows: Data) -> alt.Chart:
    """A chart of these rows, which has no marks yet."""
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1%, 10%, 100%, and 3%, 30% where the axis is short."""
    digits = (1,) if high > 100 * low else (1, 3)
    ticks = [digit * 10.0**power for power in range(-8, 5) for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def log_percent_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis of percentages."""
    return {"format": "~%", "values": log_ticks(low, high), "tickCount": 100}


def doublings(title: str, places: Sequence[int]) -> alt.X:
    """The field `x` on a logarithmic axis of base 2 with a tick at each of the places."""
    x = alt.X("x:Q", title=title).axis(values=places, tickCount=100, format="d")
    return x.scale(type="log", base=2, padding=12, nice=False)


def level(height: float) -> alt.Chart:
    """A dashed line across the chart."""
    line: alt.Chart = plot([{"y": height}]).mark_rule(color=GREY, strokeDash=[4, 3])
    return line.encode(y="y:Q")


def coloured(chart: alt.Chart, looks: Iterable[Look], field: str = "series", **legend: Any) -> Any:
    """The chart with colours by `field`, and a legend that selects series by a click."""
    labels, colours, _ = zip(*looks, strict=True)
    shown = alt.Legend(columns=_COLUMNS, **legend)
    chosen = alt.selection_point(fields=[field], bind="legend")
    return chart.add_params(chosen).encode(
        color=alt.Color(f"{field}:N", legend=shown).scale(domain=labels, range=colours),
        opacity=alt.when(chosen).then(alt.value(1.0)).otherwise(alt.value(0.12)),
    )


def zoom(*encodings: Literal["x", "y"]) -> alt.Parameter:
    """Drag to move, Shift and wheel to zoom, double click to start over.

    The wheel alone scrolls the page.
    """
    return alt.selection_interval(
        bind="scales", encodings=list(encodings), zoom="wheel![event.shiftKey]"
    )


def with_tooltips(
    headings: Sequence[str], rows: Sequence[Sequence[str]], places: Data
) -> alt.Chart:
    """A chart of `places`, where pointing at one shows its row of the figure's numbers."""
    tips = [alt.Tooltip(f"cell{i}:N", title=heading) for i, heading in enumerate(headings)]
    cells = [{f"cell{i}": cell for i, cell in enumerate(row)} for row in rows]
    return plot({**a, **b} for a, b in zip(places, cells, strict=True)).encode(tooltip=tips)


def hover(chart: alt.Chart, **encodings: Any) -> alt.Chart:
    """The chart's marks, invisible but for the one that is pointed at."""
    over = alt.selection_point(on="pointerover", clear="pointerout", empty=False)
    lit = alt.when(over).then(alt.value(0.2)).otherwise(alt.value(0.0))
    return chart.encode(opacity=lit, **encodings).add_params(over)


Columns = Mapping[Look, Sequence[float] | NDArray[np.float64]]


def number_table(
    heading: str, names: Iterable[str], columns: Columns, show: Callable[[float], str]
) -> Table:
    """A table of figures: a name, then every column's value as `show` writes it."""
    rows = zip(names, *columns.values(), strict=True)
    headings = (heading, *(look.label for look in columns))
    return headings, tuple((name, *map(show, values)) for name, *values in rows)


def curves(x: alt.X, y: alt.Y, places: Sequence[float], columns: Columns) -> Any:
    """A curve for each column over the fields `x` and `y`.

    With one place more than a column has values, places are the edges of bins and the curves are
    steps: the last value stands twice, at both edges of the last bin.
    """
    # Where no place is left for it, the second copy of the last value is not drawn.
    data = [
        {"x": place, "y": height, "series": look.label}
        for look, values in columns.items()
        for place, height in zip(places, [*values, values[-1]], strict=False)
    ]
    chart = plot(data).encode(x=x, y=y)
    if len(places) > min(map(len, columns.values())):
        chart = chart.mark_area(interpolate="step-after", line=True, fillOpacity=0.2)
        return coloured(chart, columns, symbolType="square")
    # One legend for colour and dash, with lines long enough to show the dashes.
    dashes = alt.StrokeDash("series:N").scale(
        domain=[look.label for look in columns], range=[list(look.dash) for look in columns]
    )
    chart = chart.mark_line(strokeWidth=2.2, point={"size": 40, "filled": True})
    return coloured(chart, columns, symbolType="stroke", symbolSize=450).encode(strokeDash=dashes)


def curve_figure(
    key: str,
    title: str,
    x: alt.X,
    y: alt.Y,
    places: Sequence[float],
    columns: Columns,
    table: Table,
    *layers: alt.Chart,
) -> Figure:
    """A figure of `curves`, with the table's rows as tooltips."""
    # Pointing anywhere over a bin, or nearest to a place, shows its row.
    if len(places) > len(table[1]):
        bins = with_tooltips(*table, [{"x": a, "x2": b} for a, b in pairwise(places)])
        over = hover(bins.mark_rect(color=GREY), x="x:Q", x2="x2:Q").add_params(zoom("x"))
    else:
        lines = with_tooltips(*table, [{"x": place} for place in places])
        wide = alt.ExprRef(f"width / {len(places)}")
        over = hover(lines.mark_rule(color=GREY, strokeWidth=wide), x="x:Q")
    chart = alt.layer(curves(x, y, places, columns), *layers, over).properties(height=270)
    return Figure(key, title, *table, chart)
