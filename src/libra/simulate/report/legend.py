"""Keys to a chart's series: a swatch drawn as the series is, and its name."""

from __future__ import annotations

from html import escape

from libra.simulate.report.chart import Chart, Series, XYChart
from libra.simulate.report.looks import look_of
from libra.simulate.report.marks import mark_path, tag
from libra.simulate.report.row_svg import fill_of

_WIDTH, _HEIGHT = 30, 14


def draw_legend(chart: Chart) -> str:
    """A list; the page's script makes its entries switches.  Empty for a single series."""
    if isinstance(chart, XYChart):
        entries = [(series.look, series.label, _swatch(series)) for series in chart.series]
    else:
        entries = [
            (look, label, _block(fill_of(chart, part)))
            for part, (look, label) in enumerate(chart.parts)
        ]
    if len(entries) < 2:
        return ""
    listed = "".join(
        tag("li", _svg(look, drawn) + tag("span", escape(label)), data_series=look)
        for look, label, drawn in entries
    )
    return tag("ul", listed, class_="legend", aria_label="Series")


def _svg(look: str, drawn: str) -> str:
    return tag(
        "svg",
        drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        class_=f"swatch s-{look}",
        aria_hidden="true",
        focusable="false",
    )


def _swatch(series: Series) -> str:
    middle = _HEIGHT / 2
    if series.kind == "bars":
        return tag("path", d="M8 1h14v12h-14Z", class_="b")
    line = tag("path", d=f"M1 {middle}H{_WIDTH - 1}", class_="l")
    if series.kind == "steps":
        area = tag("path", d="M1 7H29V14H1Z", class_="a") if series.filled else ""
        return area + line
    mark = mark_path(look_of(series.look).mark, [(_WIDTH / 2, middle)], 4.2)
    drawn = tag("path", d=mark, class_="m") if mark and series.kind != "rule" else ""
    return drawn if series.kind == "points" else line + drawn


def _block(fill: str) -> str:
    block = tag("path", d="M5 1h20v12h-20Z", class_=f"b {fill}")
    if fill == "hatched":
        block += tag(
            "path", d="M5 7L11 1M5 13L17 1M11 13L23 1M17 13L25 5M23 13L25 11", class_="stripe"
        )
    return block
