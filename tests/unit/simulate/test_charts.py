"""The charts: declarative specifications that compile, and pictures of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import vl_convert

from libra.simulate import chart_theme
from libra.simulate.chart_theme import Figure
from libra.simulate.charts import overall_imbalance, sections, write_plots
from libra.simulate.results import LengthBins, Study
from tests.unit.simulate.study_example import study_example

KEYS = ["lengths", "packs", "pooling", "workers", "tradeoff", "schemes", "microbatches"]
KEYS += ["scaling-fixed-batch", "scaling-weak"]


def figures_of(study: Study) -> dict[str, Figure]:
    return {figure.key: figure for _, _, figures in sections(study) for figure in figures}


def with_stages(study: Study) -> Study:
    spread = replace(study.settings.parallelism, pp=2)
    return replace(study, settings=replace(study.settings, parallelism=spread))


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return figures_of(with_stages(study_example()))


def test_bubbles_are_drawn_for_jobs_with_a_pipeline_only(figures: dict[str, Figure]) -> None:
    assert list(figures_of(study_example())) == KEYS
    assert list(figures) == [*KEYS, "pipeline"]


def test_every_chart_has_named_axes_and_a_row_of_text_for_each_row_of_numbers(
    figures: dict[str, Figure],
) -> None:
    for key, figure in figures.items():
        vega = json.dumps(vl_convert.vegalite_to_vega(figure.picture))
        assert vega.count('"title"') >= 2, key
        assert figure.rows and {len(row) for row in figure.rows} == {len(figure.headings)}
        assert all(isinstance(cell, str) and cell for row in figure.rows for cell in row)


def test_tooltips_are_the_rows_of_the_table(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        cells = [
            tuple(row[f"cell{i}"] for i in range(len(figure.headings)))
            for rows in _all_data(figure)
            for row in rows
            if "cell0" in row
        ]
        assert cells == list(figure.rows)


def _all_data(figure: Figure) -> list[list[dict[str, object]]]:
    spec = figure.page_spec
    return [*spec.get("datasets", {}).values()]


def test_values_that_a_scheme_lacks_leave_a_gap() -> None:
    study = study_example()
    points = list(study.scaling.weak)
    rates = {key: rate for key, rate in points[-1].tokens_per_second.items() if key != "libra"}
    points[-1] = replace(points[-1], tokens_per_second=rates)
    scaling = replace(study.scaling, weak=tuple(points))
    figure = figures_of(replace(study, scaling=scaling))["scaling-weak"]
    assert figure.rows[-1][figure.headings.index("Libra, tokens/s")] == "–"
    drawn = [row for rows in _all_data(figure) for row in rows if row.get("series") == "Libra"]
    assert [row["y"] is None for row in drawn] == [point is points[-1] for point in points]


def test_a_corpus_without_pools_or_samples_has_no_such_charts() -> None:
    study = study_example()
    empty = LengthBins(edges=(1, 2), samples=(0,), tokens=(0,), squares=(0.0,))
    corpus = replace(study.corpus, tokens=0, histogram=empty)
    found = figures_of(replace(study, corpus=corpus, pooling=()))
    assert set(KEYS) - set(found) == {"lengths", "pooling"}


def test_three_bins_are_drawn_as_one() -> None:
    study = study_example()
    bins = LengthBins(
        edges=(4, 5, 6, 8, 9), samples=(1, 2, 1, 4), tokens=(1,) * 4, squares=(1.0,) * 4
    )
    study = replace(study, corpus=replace(study.corpus, histogram=bins))
    rows = figures_of(study)["lengths"].rows
    assert rows == (("4 to 7", "50.0%", "75.0%", "75.0%"), ("8 to 8", "50.0%", "25.0%", "25.0%"))


def test_numbers_that_json_lacks_leave_a_gap() -> None:
    study = study_example()
    points = (replace(study.pooling[0], theory=math.nan, random=math.inf), *study.pooling[1:])
    for figure in figures_of(replace(study, pooling=points)).values():
        json.dumps(figure.page_spec, allow_nan=False)


def test_many_workers_share_steps_as_high_as_the_heaviest() -> None:
    study = study_example()
    loads = tuple(float(i % 10) for i in range(1000))
    workers = replace(study.workers, before=loads, after=loads)
    rows = figures_of(replace(study, workers=workers))["workers"].rows
    assert len(rows) == 250
    assert rows[0] == ("0 to 3", "3.00× the mean", "3.00× the mean")


def test_imbalances_between_and_inside_pools_are_multiplied() -> None:
    row = replace(study_example().candidates[0], after=0.5, intra_mean=0.1)
    assert overall_imbalance(row) == pytest.approx(1.5 * 1.1 - 1)


def test_every_chart_becomes_an_svg_and_a_png(tmp_path: Path) -> None:
    written = write_plots(study_example(), tmp_path / "new" / "folder")
    assert [path.name for path in written] == [f"{key}.{s}" for key in KEYS for s in ("svg", "png")]
    for path in written:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_study_gives_the_same_bytes() -> None:
    once, again = (figures_of(study_example()) for _ in range(2))
    assert [f.page_spec for f in once.values()] == [f.page_spec for f in again.values()]
    one, two = (chart_theme.draw_svg(found["pooling"].picture) for found in (once, again))
    assert one == two
    assert len(set(re.findall(r"url\(#(\w+)\)", one))) == one.count("<clipPath ")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", ["BLUE", "ORANGE", "GREEN", "PINK", "OLIVE", "TEAL", "GREY"])
@pytest.mark.parametrize("page", ["#ffffff", "#191f26"])
def test_colours_stand_out_from_the_light_and_the_dark_page(name: str, page: str) -> None:
    low, high = sorted((luminance(getattr(chart_theme, name)), luminance(page)))
    assert (high + 0.05) / (low + 0.05) >= 3


def test_ticks_of_a_logarithmic_axis_lie_inside_it() -> None:
    assert chart_theme.log_ticks(0.02, 0.5) == pytest.approx([0.03, 0.1, 0.3])
    assert chart_theme.log_ticks(0.002, 5) == pytest.approx([0.01, 0.1, 1])
    assert math.isfinite(sum(chart_theme.log_ticks(1e-9, 1e9)))
