"""A chart with two axes as SVG.

What depends on the vertical scale stands in a group of its own, once for each scale that the reader
may choose; the page shows one of them.  Colours and dashes are the style sheet's, by class.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.simulate.report.chart import Axis, Note, Scale, Series, XYChart
from libra.simulate.report.looks import look_of
from libra.simulate.report.marks import (
    Point,
    area_path,
    at,
    bars_path,
    line_path,
    mark_path,
    step_points,
    tag,
    text,
)
from libra.simulate.report.reading import known
from libra.simulate.report.scale import Span, round_ticks, span_of

CHARACTER = 6.5
"""Width of a character in pixels, about: no fonts are measured here."""
TOP, BOTTOM, RIGHT = 30.0, 42.0, 14.0
_MOST_BARS_APART = 128


@dataclass(frozen=True, slots=True)
class Size:
    """Of the drawing, in pixels at its natural size."""

    name: str
    width: int
    height: int

    @property
    def narrow(self) -> bool:
        return self.width < 480


WIDE = Size("wide", 640, 340)
NARROW = Size("narrow", 340, 290)


def draw_xy(chart: XYChart, size: Size) -> str:
    """The whole `<svg>`."""
    views: list[Scale] = [chart.y.scale]
    if chart.y.switch:
        views.append("linear" if chart.y.scale == "log" else "log")
    bottom = size.height - BOTTOM
    spans = {view: _vertical(chart, view, bottom) for view in views}
    ticks = {view: _ticks(chart.y, span, 5) for view, span in spans.items()}
    widest = max(
        (len(chart.y.spell(tick)) for found in ticks.values() for tick in found), default=1
    )
    left = 14 + CHARACTER * widest
    across = _horizontal(chart, left, size.width - RIGHT)
    lines = f"M{at(left)} {{}}H{at(size.width - RIGHT)}"
    parts = [
        text(chart.y.label, 2, 13, class_="al"),
        text(
            chart.x.label, (left + size.width - RIGHT) / 2, size.height - 4, class_="al",
            text_anchor="middle",
        ),
        _x_axis(chart.x, across, bottom),
        tag("path", d=lines.format(at(bottom)), class_="ax"),
    ]  # fmt: skip
    by_depth = sorted(chart.series, key=lambda series: series.kind != "bars")  # outlines on top
    for view in views:
        parts.append(
            tag(
                "g",
                _y_axis(chart.y, ticks[view], spans[view], left, lines)
                + "".join(_draw(series, across, spans[view]) for series in by_depth)
                + "".join(_note(note, across, spans[view]) for note in chart.notes),
                class_="v" if view == views[0] else "v off",
                data_v=view,
                data_a=_anchors(chart, across, spans[view]),
            )
        )
    scattered = not chart.anchors
    parts.append(
        tag("circle", class_="cur off", r=11)
        if scattered
        else tag("line", class_="cur off", y1=at(TOP - 6), y2=at(bottom))
    )
    return tag(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {size.width} {size.height}",
        class_=f"plot-svg {size.name}",
        role="img",
        aria_label=label_of(chart),
        data_mode="xy" if scattered else "x",
    )


def label_of(chart: XYChart) -> str:
    """What a screen reader says in place of the picture."""
    heading = chart.heading
    return (
        f"{heading.title}. {heading.finding} All values are in the table below the figure.".replace(
            "  ", " "
        )
    )


def _vertical(chart: XYChart, scale: Scale, bottom: float) -> Span:
    values = [value for series in chart.series for value in known(series.y)]
    values += [note.y for note in chart.notes]
    high = chart.y.high
    if high is None and values and max(values) > 0:
        high = max(values) * (1.04 if scale == "linear" else 1.15)
    low = chart.y.low if scale == chart.y.scale else None
    return span_of(values, scale=scale, start=bottom, end=TOP, low=low, high=high)


def _horizontal(chart: XYChart, left: float, right: float) -> Span:
    values = [value for series in chart.series for value in known(series.x)]
    inset = 12.0 if any(series.kind in ("line", "points") for series in chart.series) else 0.0
    if chart.x.low is not None:
        inset = 0.0
    return span_of(
        values,
        scale=chart.x.scale,
        start=left + inset,
        end=right - inset,
        low=chart.x.low,
        high=chart.x.high,
        tight=chart.x.low is None,
    )


def _ticks(axis: Axis, span: Span, most: int) -> list[float]:
    if axis.ticks is None:
        return round_ticks(span, most)
    return [tick for tick in axis.ticks if span.low <= tick <= span.high]


def _x_axis(axis: Axis, across: Span, bottom: float) -> str:
    """The line, its marks, and as many of their words as fit side by side."""
    width = abs(across.end - across.start)
    parts, free = [], -1e9
    for tick in _ticks(axis, across, max(int(width // 70), 3)):
        x, words = across.at(tick), axis.spell(tick)
        if x is None:
            continue
        half = CHARACTER * len(words) / 2
        if x - half < free:
            continue
        free = x + half + 8
        parts.append(tag("path", d=f"M{at(x)} {at(bottom)}v5", class_="ax"))
        parts.append(text(words, x, bottom + 18, class_="tk", text_anchor="middle"))
    return "".join(parts)


def _y_axis(axis: Axis, ticks: list[float], span: Span, left: float, lines: str) -> str:
    """Faint lines across, one path for all, and their words."""
    placed = [(tick, y) for tick in ticks if (y := span.at(tick)) is not None]
    grid = "".join(lines.format(at(y)) for _, y in placed)
    return tag("path", d=grid, class_="gr") + "".join(
        text(axis.spell(tick), left - 7, y + 4, class_="tk", text_anchor="end")
        for tick, y in placed
    )


def _draw(series: Series, across: Span, up: Span) -> str:
    """One series, in a group that the legend can hide."""
    look, base = look_of(series.look), up.start
    if series.kind == "rule":
        y = up.at(series.y[0]) if series.y else None
        drawn = "" if y is None else _line(f"M{at(across.start)} {at(y)}H{at(across.end)}")
    elif series.kind == "bars":
        share = 0.66 if len(series.y) <= _MOST_BARS_APART else 1.0
        edges, tops = [across.at(x) for x in series.x], [up.at(y) for y in series.y]
        drawn = tag("path", d=bars_path(edges, tops, base, share=share), class_="b")
    elif series.kind == "steps":
        edges, tops = [across.at(x) for x in series.x], [up.at(y) for y in series.y]
        points = step_points(edges, tops)
        area = tag("path", d=area_path(points, base), class_="a") if series.filled else ""
        drawn = area + _line(line_path(points))
    else:
        points = _places(series, across, up)
        drawn = ""
        if series.kind == "line":
            area = tag("path", d=area_path(points, base), class_="a") if series.filled else ""
            drawn = area + _line(line_path(points))
        if series.kind == "points" or len(points) <= 24:
            faint = series.faint or (False,) * len(points)
            for hollow in (False, True):
                chosen = [
                    p for p, is_hollow in zip(points, faint, strict=False) if is_hollow == hollow
                ]
                path = mark_path(look.mark, chosen, 4.6 if series.kind == "points" else 3.6)
                if path:
                    drawn += tag("path", d=path, class_="m h" if hollow else "m")
    return tag("g", drawn, class_=f"s-{series.look}", data_s=series.look) if drawn else ""


def _line(path: str) -> str:
    return tag("path", d=path, class_="l") if path else ""


def _places(series: Series, across: Span, up: Span) -> list[Point]:
    return [(across.at(x), up.at(y)) for x, y in zip(series.x, series.y, strict=False)]


def _note(note: Note, across: Span, up: Span) -> str:
    x, y = across.at(note.x), up.at(note.y)
    if x is None or y is None:
        return ""
    room = across.end + 10 - x
    if note.ring:
        half = CHARACTER * len(note.text) / 2
        middle = min(max(x, across.start + half), across.end - half)
        above = y - 16 > TOP + 6  # the axis's label stands there
        words = text(
            note.text, middle, y - 16 if above else y + 25, class_="nt", text_anchor="middle"
        )
        return tag("circle", cx=at(x), cy=at(y), r=10, class_="ring") + words
    fits_right = CHARACTER * len(note.text) + 14 < room
    words = text(
        note.text,
        x + 14 if fits_right else x - 14,
        y - 8,
        class_="nt",
        text_anchor="start" if fits_right else "end",
    )
    return words


def _anchors(chart: XYChart, across: Span, up: Span) -> str:
    """`row,x[,y,series]` of each place that a tooltip can point at, `;` between them."""
    if chart.anchors:
        places = [(row, across.at(x)) for row, x in enumerate(chart.anchors)]
        return ";".join(f"{row},{at(x)}" for row, x in places if x is not None)
    return ";".join(
        f"{row},{at(x)},{at(y)},{series.look}"
        for series in chart.series
        if series.kind == "points"
        for row, (x, y) in zip(series.anchors, _places(series, across, up), strict=False)
        if x is not None and y is not None
    )
