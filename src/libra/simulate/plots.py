"""The report's figures as pictures, PNG and SVG, drawn by matplotlib from the same charts.

matplotlib is in the extra `report`.  Figures are drawn on objects of their own, without pyplot and
its global state, and come out the same byte for byte each time.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra.simulate.report.chart import Axis, Chart, Heading, RowChart, Series, XYChart
from libra.simulate.report.charts import all_charts
from libra.simulate.report.looks import look_of
from libra.simulate.report.reading import Number, known
from libra.simulate.report.row_svg import fill_of
from libra.simulate.report.scale import MOST_DECADES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#222222"
_FAINT = "#E4E8ED"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same picture everywhere
    "font.size": 12.0,
    "axes.labelsize": 12.0,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "hatch.color": "white",
    "hatch.linewidth": 1.4,
    "text.color": _INK,
    "text.parse_math": False,  # a corpus may have a dollar in its name
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "libra",
}
_MARKS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle": "^",
    "down": "v",
    "cross": "X",
    "plus": "P",
    "none": "",
}
_MOST_MARKS = 24
_SUBTITLE_WIDTH = 92


def write_plots(simulation: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `<figure>.png` and `<figure>.svg` for every figure that has something to show.

    Makes `folder` where it is missing.  Returns the files.  ValueError where matplotlib is missing,
    OSError where a file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed; install the extra `report`: "
            "pip install 'libra-attention[report]'"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(_STYLE):
        for chart in all_charts(simulation):
            if not chart.drawable:
                continue
            figure = draw_chart(chart)
            for suffix in (".png", ".svg"):
                path = folder / f"{chart.heading.key}{suffix}"
                figure.savefig(
                    path,
                    dpi=160,
                    facecolor="white",
                    metadata={"Date": None} if suffix == ".svg" else None,
                )
                written.append(path)
    return written


def draw_chart(chart: Chart) -> Figure:
    """One chart on a figure of its own."""
    from matplotlib.figure import Figure

    height = 5.0 if isinstance(chart, XYChart) else _height(chart)
    figure = Figure(figsize=(8.8, height))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    ax = figure.subplots()
    _title(ax, chart.heading)
    if isinstance(chart, XYChart):
        _draw_xy(ax, chart)
    else:
        _draw_rows(ax, chart)
    return figure


def _title(ax: Axes, heading: Heading) -> None:
    """Title in bold, what the figure says below it."""
    said = textwrap.fill(heading.finding, _SUBTITLE_WIDTH)
    lines = said.count("\n") + 1 if said else 0
    ax.set_title(heading.title, loc="left", fontsize=13.5, fontweight="bold", pad=8 + 15 * lines)
    if said:
        ax.annotate(
            said, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points",
            va="bottom", ha="left", fontsize=10.5,
        )  # fmt: skip


def _draw_xy(ax: Axes, chart: XYChart) -> None:
    for series in sorted(chart.series, key=lambda series: series.kind != "bars"):
        _draw_series(ax, series)
    ax.set_xlabel(chart.x.label)
    ax.set_ylabel(chart.y.label)
    _scale(ax, chart.x, "x", [x for series in chart.series for x in known(series.x)])
    _scale(ax, chart.y, "y", [y for series in chart.series for y in known(series.y)])
    ax.grid(axis="y")
    for note in chart.notes:
        if note.ring:
            ax.plot(
                [note.x], [note.y], marker="o", markersize=16, markerfacecolor="none",
                markeredgecolor=_INK, markeredgewidth=1.6, linestyle="none",
            )  # fmt: skip
        ax.annotate(
            note.text, (note.x, note.y), (0, 11) if note.ring else (-8, -2),
            textcoords="offset points", ha="center" if note.ring else "right",
            fontweight="bold", fontsize=11,
        )  # fmt: skip
    handles, labels = ax.get_legend_handles_labels()
    order = [series.label for series in chart.series]
    pairs = sorted(zip(handles, labels, strict=True), key=lambda pair: order.index(pair[1]))
    if len(pairs) > 1:
        ax.legend(
            [handle for handle, _ in pairs], [label for _, label in pairs],
            frameon=False, fontsize=10.5, loc="best",
        )  # fmt: skip


def _draw_series(ax: Axes, series: Series) -> None:
    look = look_of(series.look)
    line: Any = {
        "color": look.day,
        "linewidth": 0.8 * look.width,
        "linestyle": (0, look.dash) if look.dash else "-",
        "label": series.label,
    }
    x, y = _gaps(series.x), _gaps(series.y)
    if series.kind == "rule":
        if known(series.y):
            ax.axhline(y[0], **line)
    elif series.kind == "bars":
        widths = [right - left for left, right in pairwise(x)][: len(y)]
        middles = [left + width / 2 for left, width in zip(x, widths, strict=False)]
        ax.bar(
            middles,
            y[: len(middles)],
            [0.7 * w for w in widths],
            color=look.day,
            label=series.label,
        )
    elif series.kind == "steps":
        if series.filled:
            ax.stairs(y, x[: len(y) + 1], fill=True, color=look.day, alpha=0.16)
        ax.stairs(y, x[: len(y) + 1], baseline=None, **line)
    elif series.kind == "points":
        faint = series.faint or (False,) * len(x)
        for hollow in (False, True):
            chosen = [i for i, is_hollow in enumerate(faint) if is_hollow == hollow]
            ax.plot(
                [x[i] for i in chosen], [y[i] for i in chosen],
                marker=_MARKS[look.mark], markersize=8, linestyle="none", color=look.day,
                markerfacecolor="white" if hollow else look.day,
                label=series.label if chosen and (not hollow or all(faint)) else None,
            )  # fmt: skip
    else:
        if series.filled:
            ax.fill_between(x, y, color=look.day, alpha=0.16, linewidth=0)
        if len(x) <= _MOST_MARKS:
            line |= {"marker": _MARKS[look.mark], "markersize": 6, "markeredgecolor": "white"}
        ax.plot(x, y, **line)


def _scale(ax: Axes, axis: Axis, name: str, values: Sequence[float]) -> None:
    """Kind of scale, ends and ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    mine = ax.xaxis if name == "x" else ax.yaxis
    set_scale = ax.set_xscale if name == "x" else ax.set_yscale
    set_ends = ax.set_xlim if name == "x" else ax.set_ylim
    positive = [value for value in values if value > 0]
    is_log = axis.scale == "log" and bool(positive)
    if is_log:
        set_scale("log", nonpositive="mask")  # as the report: a zero has no place there
    mine.set_major_formatter(FuncFormatter(lambda value, _: axis.spell(value)))
    mine.set_minor_formatter(NullFormatter())
    low, high = axis.low, axis.high
    if is_log and low is None and name == "y":
        low = max(min(positive), max(positive) / 10**MOST_DECADES) / 1.5
    if low is None and name == "y":
        low = min(0.0, *values, 0.0)
    if low is not None or high is not None:
        if low is not None and high is not None and low >= high:
            high = None
        set_ends(low, high)
    if axis.ticks is not None:
        left, right = sorted(ax.get_xlim() if name == "x" else ax.get_ylim())
        inside = [tick for tick in axis.ticks if left <= tick <= right]
        mine.set_major_locator(FixedLocator(inside))
        mine.set_minor_locator(NullLocator())


def _gaps(values: Sequence[Number]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _height(chart: RowChart) -> float:
    """Inches for all bars."""
    bars = 1 if chart.stacked else len(chart.parts)
    return 1.9 + len(chart.rows) * (0.22 * bars + 0.2)


def _draw_rows(ax: Axes, chart: RowChart) -> None:
    parts = len(chart.parts)
    thick = 0.72 if chart.stacked else 0.82 / max(parts, 1)
    starts = [0.0] * len(chart.rows)
    for part, (key, label) in enumerate(chart.parts):
        widths = [_value(row.values, part) for row in chart.rows]
        offset = 0.0 if chart.stacked else (part - (parts - 1) / 2) * thick
        ax.barh(
            [i + offset for i in range(len(widths))], widths, thick * 0.94, left=starts,
            label=label, **_paint(key, fill_of(chart, part)),
        )  # fmt: skip
        if chart.stacked:
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
            continue
        for i, (row, width) in enumerate(zip(chart.rows, widths, strict=True)):
            if part < len(row.notes):
                _note(ax, row.notes[part], width, i + offset)
    if chart.stacked:
        for i, (row, end) in enumerate(zip(chart.rows, starts, strict=True)):
            if row.notes:
                _note(ax, row.notes[0], end, i)
    ax.set_yticks(range(len(chart.rows)), [row.label for row in chart.rows])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.set_xlabel(chart.x.label)
    ax.xaxis.set_major_formatter(lambda value, _: chart.x.spell(value))
    ax.grid(axis="x")
    ax.margins(x=0.16)
    ax.set_xlim(left=0)
    ax.figure.legend(loc="outside lower center", ncols=max(parts, 1), frameon=False, fontsize=10.5)


def _paint(key: str, fill: str) -> dict[str, Any]:
    colour = look_of(key).day
    paints: dict[str, dict[str, Any]] = {
        "solid": {"color": colour},
        "hatched": {"facecolor": colour, "edgecolor": "white", "hatch": "////", "linewidth": 0},
        "pale": {"facecolor": colour, "edgecolor": "#7A8592", "linewidth": 0.8},
        "light": {"facecolor": (colour, 0.3), "edgecolor": colour},
        "outline": {"facecolor": "none", "edgecolor": colour, "linestyle": (0, (3, 2))},
    }
    return paints[fill]


def _value(values: Sequence[Number], part: int) -> float:
    value = values[part] if part < len(values) else None
    return 0.0 if value is None else value


def _note(ax: Axes, words: str, x: float, y: float) -> None:
    ax.annotate(
        words, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=10.5,
        fontweight="bold",
    )  # fmt: skip
