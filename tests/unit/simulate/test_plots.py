"""The report's figures as pictures: both formats, the same every time, whatever is missing."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from libra.simulate.plots import draw_chart, write_plots
from libra.simulate.report.charts import all_charts
from tests.unit.simulate.simulation_example import simulation_example

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_plots(simulation_example(), tmp_path_factory.mktemp("plots") / "new" / "folder")


def test_every_figure_of_the_report_becomes_a_png_and_an_svg(written: list[Path]) -> None:
    keys = [chart.heading.key for chart in all_charts(simulation_example())]
    assert [path.name for path in written] == [f"{key}.{s}" for key in keys for s in ("png", "svg")]
    for path in written:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_simulation_gives_the_same_bytes(written: list[Path], tmp_path: Path) -> None:
    only = {"pipeline": simulation_example()["pipeline"]}
    again = {path.name: path for path in write_plots(only, tmp_path)}
    once_more = {path.name: path for path in write_plots(only, tmp_path / "twice")}
    assert set(again) == {"pipeline.png", "pipeline.svg"}
    for name, path in again.items():
        assert path.read_bytes() == once_more[name].read_bytes()


def test_axes_and_legend_are_named() -> None:
    for chart in all_charts(simulation_example()):
        figure = draw_chart(chart)
        (ax,) = figure.axes
        assert ax.get_title(loc="left") == chart.heading.title
        assert ax.get_xlabel() == chart.x.label
        assert ax.get_legend() is not None or figure.legends


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert write_plots({}, tmp_path) == []


def test_missing_values_and_odd_names_do_not_break_a_picture(tmp_path: Path) -> None:
    simulation = simulation_example()
    simulation["pooling"][1] |= {"before": None, "after": math.nan, "theory": math.inf}
    simulation["schemes"][0] |= {"label": "$a_b^ & <c>", "attention_seconds": None}
    simulation["workers"] = {"before": [], "after": [1.0]}
    simulation["microbatches"]["counts"]["libra"] = []
    simulation["candidates"] = simulation["candidates"][:1]
    kept = ("pooling", "schemes", "workers", "microbatches", "candidates")
    assert len(write_plots({key: simulation[key] for key in kept}, tmp_path)) == 10


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"libra-attention\[report\]"):
        write_plots({}, tmp_path)
