"""The report: a simulation in one HTML file that needs nothing but itself.

Figures are drawn here, as SVG, once for a wide and once for a narrow screen; the page's script adds
tooltips, switches and sorting, and the page reads as well without it.  Its Content-Security-Policy
allows this script and this style sheet, and nothing from anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from libra.simulate.report.candidates import candidate_table
from libra.simulate.report.chart import Chart, Heading, Table, XYChart
from libra.simulate.report.charts import all_sections
from libra.simulate.report.embedded import embed_json, source_of
from libra.simulate.report.legend import draw_legend
from libra.simulate.report.looks import LOOKS
from libra.simulate.report.reading import record, words
from libra.simulate.report.row_svg import draw_rows
from libra.simulate.report.summary import (
    key_numbers,
    recommendation,
    settings_groups,
    warnings,
)
from libra.simulate.report.xy_svg import NARROW, WIDE, draw_xy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """A chart as the template takes it; `drawings` and `legend` are markup."""

    heading: Heading
    drawings: tuple[str, ...]
    legend: str
    scale: str
    """The vertical scale shown first where there is a choice, else empty."""

    table: Table


def render_report(simulation: Mapping[str, Any]) -> str:
    """The page.  What is missing from `simulation` is left out or said to be missing.

    ValueError where jinja2 is missing.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ValueError(
            "a report needs jinja2, which is not installed; install the extra `report`: "
            "pip install 'libra-attention[report]'"
        ) from error
    style = _file("page.css") + _looks()
    script = _file("page.js")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_file("page.html")).render(
        style=style,
        script=script,
        policy=(
            f"default-src 'none'; style-src {source_of(style)}; script-src {source_of(script)}; "
            "base-uri 'none'; form-action 'none'"
        ),
        data=embed_json(simulation),
        source=words(record(simulation.get("corpus")).get("source")),
        created=words(simulation.get("created")),
        command=words(simulation.get("command")),
        recommendation=recommendation(simulation),
        numbers=key_numbers(simulation),
        warnings=warnings(simulation),
        candidates=candidate_table(simulation),
        settings=settings_groups(simulation),
        sections=[
            (key, title, [_figure(chart) for chart in charts])
            for key, title, charts in all_sections(simulation)
        ],
    )


def write_report(simulation: Mapping[str, Any], path: Path) -> None:
    """Write the page, UTF-8.  OSError where `path` cannot be written."""
    path.write_text(render_report(simulation), encoding="utf-8")


def _figure(chart: Chart) -> _Figure:
    drawings: tuple[str, ...] = ()
    if chart.drawable:
        drawings = tuple(
            draw_xy(chart, size) if isinstance(chart, XYChart) else draw_rows(chart, size)
            for size in (WIDE, NARROW)
        )
    switch = isinstance(chart, XYChart) and chart.y.switch and chart.drawable
    return _Figure(
        heading=chart.heading,
        drawings=drawings,
        legend=draw_legend(chart) if chart.drawable else "",
        scale=chart.y.scale if switch and isinstance(chart, XYChart) else "",
        table=chart.table,
    )


def _file(name: str) -> str:
    return resources.files("libra.simulate.report").joinpath(name).read_text(encoding="utf-8")


def _looks() -> str:
    """Style rules of every look: its colour by day and by night, its dash and width."""
    day = "".join(f"--s-{key}:{look.day};" for key, look in LOOKS.items())
    night = "".join(f"--s-{key}:{look.night};" for key, look in LOOKS.items())
    rules = [":root{--c:var(--axis)}"]  # of a series that nobody thought of
    for key, look in LOOKS.items():
        rules.append(f".s-{key}{{--c:var(--s-{key})}}")
        line = f"stroke-width:{look.width:g}"
        if look.dash:
            line += ";stroke-dasharray:" + " ".join(map(str, look.dash))
        rules.append(f".s-{key} .l{{{line}}}")
    return (
        f":root{{{day}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{night}}}}}\n"
        + "\n".join(rules)
        + "\n"
    )
