"""The report: a study as one HTML file that needs no network.

    Study ──┬── numbers and prose ───────────────────────┐
            ├── charts.py ── Vega-Lite specifications ───┼──> report.html ──> the page
            └── JSON, to save ───────────────────────────┤
    report.js ── bundled with Vega by vl-convert ────────┘

The page's Content-Security-Policy allows its one script and nothing from any address.  Names of
corpora and configurations stand in the page as text and as escaped JSON; no chart contains them.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from functools import cache
from importlib import resources
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any, Final

from libra.extras import require
from libra.simulate import formats
from libra.simulate.results import LengthBins, Study, study_json

PACKAGES: Final = ("jinja2", "altair", "vl_convert")
"""Packages of the extra `report`."""


def write_report(study: Study, path: Path) -> None:
    """Write the page, UTF-8.  OSError where `path` cannot be written."""
    path.write_text(render_report(study), encoding="utf-8")


def render_report(study: Study) -> str:
    """The page.  MissingPackageError where the extra `report` is not installed."""
    jinja2, *_ = (require(package, "a report") for package in PACKAGES)
    from libra.simulate.chart_theme import draw_svg
    from libra.simulate.charts import sections

    parts = sections(study)
    figures = [figure for _, _, found in parts for figure in found]
    script = _script()
    specs = {figure.key: figure.page_spec for figure in figures}
    pictures = {figure.key: _base64(draw_svg(figure.picture).encode()) for figure in figures}
    best = study.recommendation.candidate
    # Every value is escaped and none may be missing; only our own script and JSON are marked safe.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(getmembers(formats, isfunction))
    page: str = environment.from_string(_file("report.html")).render(
        study=study,
        sections=parts,
        pictures=pictures,
        best=study.candidates[best if best is not None else 0],
        libra=next((row for row in study.schemes if row.key == "libra"), None),
        fastest=min((row.step_seconds for row in study.candidates if row.fits), default=None),
        half_cost=half_cost(study.corpus.histogram),
        settings=settings_groups(study),
        study_json=_base64(json.dumps(study_json(study)).encode()),
        charts=jinja2.utils.htmlsafe_json_dumps(specs, allow_nan=False),
        script=jinja2.utils.markupsafe.Markup(script),
        script_hash=f"sha256-{_base64(hashlib.sha256(script.encode()).digest())}",
    )
    return page


@cache
def _script() -> str:
    """The page's script with Vega; bundling takes seconds."""
    bundle: str = require("vl_convert", "a report").javascript_bundle(_file("report.js"))
    return bundle.replace("</script", "<\\/script")


def _file(name: str) -> str:
    return resources.files("libra.simulate").joinpath(name).read_text(encoding="utf-8")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def half_cost(bins: LengthBins) -> tuple[int, float, float]:
    """The longest samples with half of the attention cost: least length, and their shares of all
    samples and of the cost.
    """
    # From the longest bin down, until half of the cost is held.
    start, held = len(bins.squares), 0.0
    while start > 0 and held < 0.5 * sum(bins.squares):
        start -= 1
        held += bins.squares[start]
    samples = sum(bins.samples[start:]) / max(sum(bins.samples), 1)
    return bins.edges[start], samples, held / max(sum(bins.squares), 1.0)


def settings_groups(study: Study) -> dict[str, dict[str, str]]:
    """Everything that was chosen, and the corpus as it was read: headings, names and values."""
    corpus, settings = dataclasses.asdict(study.corpus), dataclasses.asdict(study.settings)
    del corpus["histogram"]
    # The dataclasses among the settings have a heading each, the single values one together.
    parts = {name: value for name, value in settings.items() if isinstance(value, dict)}
    planning = {name: value for name, value in settings.items() if name not in parts}
    return {
        title.capitalize(): {name.replace("_", " "): _spelled(v) for name, v in values.items()}
        for title, values in {"corpus": corpus, "planning": planning, **parts}.items()
    }


def _spelled(value: Any) -> str:
    """A setting, numbers with separators."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else float(f"{value:.6g}")
    return str(value) if isinstance(value, bool | str) else f"{value:,}"
