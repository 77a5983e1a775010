"""Horizontal bars as SVG: parts of a row end to end, or below each other."""

from __future__ import annotations

from libra.simulate.report.chart import Row, RowChart
from libra.simulate.report.marks import at, tag, text
from libra.simulate.report.reading import known
from libra.simulate.report.scale import Span, round_ticks, span_of
from libra.simulate.report.xy_svg import CHARACTER, Size

TOP, BOTTOM = 8.0, 42.0
FILLS = ("light", "solid", "outline")
"""Of bars below each other, in turn; parts end to end are solid, hatched, light."""
STACKED_FILLS = ("solid", "hatched", "pale")


def fill_of(chart: RowChart, part: int) -> str:
    fills = STACKED_FILLS if chart.stacked else FILLS
    return fills[part % len(fills)]


def draw_rows(chart: RowChart, size: Size) -> str:
    """The whole `<svg>`; its height follows from the number of rows."""
    thick = 24.0 if chart.stacked else 15.0
    bars = 1 if chart.stacked else len(chart.parts)
    head = 20.0 if size.narrow else 0.0
    pitch = head + bars * thick + (12.0 if chart.stacked else 18.0)
    bottom = TOP + pitch * len(chart.rows)
    notes = [len(note) for row in chart.rows for note in row.notes]
    left = 2.0
    if not size.narrow:
        left = 14 + CHARACTER * max((len(row.label) for row in chart.rows), default=1)
    right = size.width - 10.0
    if not (size.narrow and chart.stacked):
        right -= CHARACTER * max(notes, default=0) + 6
    across = span_of(_ends(chart), scale="linear", start=left, end=right, high=chart.x.high)
    parts = [_axis(chart, across, bottom), _hatch(chart, size)]
    centres = []
    for index, row in enumerate(chart.rows):
        top = TOP + index * pitch
        parts.append(_row(chart, row, across, top, head=head, thick=thick, size=size))
        centres.append(f"{index},{at(top + (pitch - 12) / 2)}")
    return tag(
        "svg",
        tag("g", "".join(parts), class_="v", data_v="linear", data_a=";".join(centres)),
        viewBox=f"0 0 {size.width} {at(bottom + BOTTOM)}",
        class_=f"plot-svg {size.name}",
        role="img",
        aria_label=(
            f"{chart.heading.title}. {chart.heading.finding} "
            "All values are in the table below the figure."
        ),
        data_mode="y",
    )


def _ends(chart: RowChart) -> list[float]:
    """Where bars end."""
    if chart.stacked:
        return [sum(known(row.values)) for row in chart.rows]
    return [value for row in chart.rows for value in known(row.values)]


def _axis(chart: RowChart, across: Span, bottom: float) -> str:
    parts = []
    for tick in round_ticks(across, max(int((across.end - across.start) // 80), 2)):
        x = across.at(tick)
        if x is not None:
            parts.append(tag("path", d=f"M{at(x)} {at(TOP - 4)}V{at(bottom)}", class_="gr"))
            parts.append(
                text(chart.x.spell(tick), x, bottom + 16, class_="tk", text_anchor="middle")
            )
    middle = (across.start + across.end) / 2
    parts.append(text(chart.x.label, middle, bottom + 37, class_="al", text_anchor="middle"))
    return "".join(parts)


def _hatch(chart: RowChart, size: Size) -> str:
    """Stripes for the second part of stacked bars, seen on paper without colour too."""
    if not chart.stacked:
        return ""
    return tag(
        "pattern",
        tag("path", d="M0 6L6 0M-1 1L1 -1M5 7L7 5", class_="stripe"),
        id=_hatch_name(chart, size),
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
    )


def _hatch_name(chart: RowChart, size: Size) -> str:
    return f"hatch-{chart.heading.key}-{size.name}"


def _row(
    chart: RowChart, row: Row, across: Span, top: float, *, head: float, thick: float, size: Size
) -> str:
    bars = 1 if chart.stacked else len(chart.parts)
    if size.narrow:
        parts = [text(row.label, across.start, top + 14, class_="rl")]
    else:
        middle = top + head + bars * thick / 2 + 4
        parts = [text(row.label, across.start - 10, middle, class_="rl", text_anchor="end")]
    start, y = 0.0, top + head
    for part, value in enumerate(row.values):
        if value is None or part >= len(chart.parts):
            y += 0.0 if chart.stacked else thick
            continue
        low, high = across.at(start), across.at(start + value)
        assert low is not None and high is not None  # a linear span has a place for every number
        look = chart.parts[part][0]
        fill = fill_of(chart, part)
        path = f"M{at(low)} {at(y)}H{at(high)}v{at(thick - 2)}H{at(low)}Z"
        drawn = tag("path", d=path, class_=f"b {fill}")
        if fill == "hatched":
            drawn += tag("path", d=path, fill=f"url(#{_hatch_name(chart, size)})")
        if not chart.stacked and part < len(row.notes):
            drawn += text(row.notes[part], high + 6, y + thick - 4, class_="nt")
        parts.append(tag("g", drawn, class_=f"s-{look}", data_s=look))
        if chart.stacked:
            start += value
        else:
            y += thick
    if chart.stacked and row.notes:
        end = across.at(start)
        assert end is not None
        if size.narrow:
            parts.append(
                text(row.notes[0], size.width - 4, top + 14, class_="nt", text_anchor="end")
            )
        else:
            parts.append(text(row.notes[0], end + 8, y + thick / 2 + 3, class_="nt"))
    return "".join(parts)
