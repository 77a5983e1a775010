"""The report: one page that needs nothing but itself, whatever the simulation holds."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from libra.simulate.report import render_report, write_report
from libra.simulate.report.looks import LOOKS
from tests.unit.simulate.page_reader import Element, read_page
from tests.unit.simulate.simulation_example import simulation_example

pytest.importorskip("jinja2")

FIGURES = [
    "lengths",
    "packs",
    "pooling",
    "workers",
    "tradeoff",
    "schemes",
    "microbatches",
    "scaling-fixed-batch",
    "scaling-weak",
    "pipeline",
]
HOSTILE = '</script><script>alert(1)</script><b onclick="x">\'"&amp; {{ 7*7 }} é漢字\u2028<!--'
LISTS = ["pooling", "candidates", "schemes", "pipeline", "warnings"]


@pytest.fixture(scope="module")
def page() -> str:
    return render_report(simulation_example())


@pytest.fixture(scope="module")
def root(page: str) -> Element:
    return read_page(page)


def the(root: Element, name: str, **wanted: str) -> Element:
    (found,) = root.all(name, **wanted)
    return found


def test_the_page_is_well_formed_and_its_anchors_exist_once(root: Element) -> None:
    names = [e.attributes["id"] for e in root.every() if "id" in e.attributes]
    assert len(names) == len(set(names))
    links = [e.attributes["href"] for e in root.all("a")]
    labels = [
        name for e in root.every() for name in e.attributes.get("aria-labelledby", "").split()
    ]
    assert {link.removeprefix("#") for link in links} | set(labels) <= set(names)
    assert the(root, "html").attributes["lang"] == "en"
    assert [e.name for e in root.every() if e.name in ("h1", "main")] == ["main", "h1"]


def test_nothing_is_loaded_from_elsewhere_and_the_policy_says_so(page: str, root: Element) -> None:
    assert not re.search(r"https?://|@import|url\((?!#hatch-)", page)
    for element in root.every():
        assert element.name not in ("link", "iframe", "img", "object", "embed")
        assert not {"src", "style", "srcset", "action"} & set(element.attributes)
        assert not [name for name in element.attributes if name.startswith("on")]
    policy = the(root, "meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_the_page_is_small(page: str) -> None:
    assert len(page.encode()) < 260_000


def test_every_figure_has_title_caption_label_axes_and_table(root: Element) -> None:
    figures = root.all("figure")
    assert [figure.attributes["id"] for figure in figures] == FIGURES
    for figure in figures:
        title = the(figure, "h3").text
        assert title and the(figure, "figcaption").text
        assert the(figure, "p", class_="finding").text
        drawings = figure.all("svg", class_="plot-svg")
        assert [d.attributes["class"].split()[-1] for d in drawings] == ["wide", "narrow"]
        for drawing in drawings:
            assert drawing.attributes["role"] == "img"
            assert drawing.attributes["aria-label"].startswith(title)
            assert drawing.all("text", class_="al"), "no axis has a label"
            assert "nan" not in str(drawing).lower() and "inf" not in str(drawing).lower()
        table = the(the(figure, "details"), "table")
        rows = the(table, "tbody").all("tr")
        assert rows and len(the(table, "thead").all("th")) == len(rows[0].children)


def test_tooltips_point_at_rows_of_the_table(root: Element) -> None:
    for figure in root.all("figure"):
        rows = len(the(figure, "tbody").all("tr"))
        for view in figure.all("g", class_="v"):
            pointed = [entry.split(",") for entry in view.attributes["data-a"].split(";")]
            assert sorted(int(entry[0]) for entry in pointed) == list(range(rows))


def test_legends_name_the_series_that_are_drawn(root: Element) -> None:
    for figure in root.all("figure"):
        keys = {entry.attributes["data-series"] for entry in figure.all("li")}
        drawn = {g.attributes["data-s"] for g in figure.all("g") if "data-s" in g.attributes}
        assert keys == drawn


def test_the_recommendation_comes_first_with_the_line_to_paste(root: Element) -> None:
    simulation = simulation_example()
    section = the(root, "main").children[0]
    assert the(section, "p", class_="lead").text == simulation["recommendation"]["text"]
    assert the(section, "pre").text == simulation["recommendation"]["line"]
    assert "P = 8, B = 4K, H = 4: 0.2% slower" in the(section, "p", class_="next").text
    numbers = [e.text for e in section.all("strong")]
    assert numbers == ["1.52×", "5.58 s", "6.02M", "0.1%", "3.0%", "2.8%", "69.3 GB", "64"]


def test_candidates_are_sortable_by_number_and_the_best_is_marked(root: Element) -> None:
    table = the(root, "table", class_="sortable")
    rows = the(table, "tbody").all("tr")
    assert len(rows) == len(simulation_example()["candidates"])
    (best,) = table.all("tr", class_="best")
    assert best is rows[6] and best.children[-1].text == "recommended"
    assert rows[-1].children[-1].text == "needs more memory than a GPU has"
    step = simulation_example()["candidates"][6]["step_seconds"]
    assert float(best.children[3].attributes["data-v"]) == step


def test_warnings_and_settings_are_shown(root: Element) -> None:
    warned = [e.text for e in the(root, "section", class_="warn").all("li")]
    assert warned == simulation_example()["warnings"]
    settings_text = the(root, "section", id="settings").text
    for said in ("Qwen3-30B-A3B", "H100", "surplus", "262,144 (256K)", "libra simulate lengths"):
        assert said in settings_text


def test_the_data_travels_with_the_page_unchanged(root: Element) -> None:
    held = the(root, "script", id="simulation")
    assert held.attributes["type"] == "application/json"
    assert json.loads(held.text) == simulation_example()


def test_hostile_names_stay_text() -> None:
    simulation = simulation_example()
    simulation["corpus"]["source"] = HOSTILE
    simulation["command"] = HOSTILE
    simulation["recommendation"] |= {"text": HOSTILE, "line": HOSTILE}
    simulation["warnings"] = [HOSTILE]
    simulation["workers"]["title"] = HOSTILE
    simulation["candidates"][0]["problem"] = HOSTILE
    simulation["settings"]["cluster"] = {HOSTILE: HOSTILE}
    simulation["pipeline"][0]["schedule"] = HOSTILE
    for scheme in simulation["schemes"]:
        scheme["label"] = HOSTILE
    simulation["schemes"][0]["key"] = HOSTILE
    simulation["microbatches"]["counts"][HOSTILE] = [1.0] * 24
    simulation["scaling"]["weak"][0]["tokens_per_second"][HOSTILE] = 5.0
    root = read_page(render_report(simulation))
    assert len(root.all("script")) == 2
    assert [e for e in root.every() if "onclick" in e.attributes] == []
    assert [e.text for e in root.all("b")] == [HOSTILE]  # the one that names the corpus
    assert the(root, "p", class_="lead").text == HOSTILE
    assert json.loads(the(root, "script", id="simulation").text) == simulation


def test_an_empty_simulation_says_what_is_missing() -> None:
    root = read_page(render_report({}))
    figures = root.all("figure")
    assert [figure.attributes["id"] for figure in figures] == FIGURES
    assert all(figure.all("p", class_="empty") for figure in figures)
    assert "names no configuration" in the(root, "p", class_="lead").text
    assert root.all("table") == []


@pytest.mark.parametrize("name", LISTS)
def test_a_list_may_be_empty(name: str) -> None:
    simulation = simulation_example() | {name: []}
    read_page(render_report(simulation))


def test_not_a_number_becomes_null_and_a_dash() -> None:
    simulation = simulation_example()
    simulation["candidates"][6]["gigabytes"] = math.nan
    simulation["candidates"][6]["step_low"] = math.inf
    simulation["pooling"][2]["after"] = None
    root = read_page(render_report(simulation))
    held = json.loads(the(root, "script", id="simulation").text)
    assert held["candidates"][6]["gigabytes"] is None
    assert "nan" not in the(root, "main").text.lower().replace("between nodes", "")


def test_a_simulation_of_many_workers_and_bins_stays_small() -> None:
    simulation = simulation_example()
    simulation["workers"] = {"before": [1.0, 3.0] * 4096, "after": [1.0] * 8192, "title": "Many"}
    edges = sorted({*range(1, 10), *(round(1.09**i) for i in range(26, 240))})
    ones = [1.0] * (len(edges) - 1)
    simulation["corpus"]["histogram"] = {
        "edges": edges,
        "samples": ones,
        "tokens": ones,
        "squares": ones,
    }
    page = render_report(simulation)
    assert len(page.encode()) < 400_000
    bars = the(the(read_page(page), "figure", id="workers"), "tbody").all("tr")
    assert 128 < len(bars) <= 384


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in the JSON; of a list its first two and its last."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            found += places(value[i], (*path, i))
    return found


ODD = [None, math.nan, math.inf, -1.0, 0, 1e308, 1e-308, "odd", "", [], {}, [None], True]


@settings(max_examples=40, deadline=None, phases=[Phase.generate])  # shrinking takes minutes
@given(st.data())
def test_no_missing_or_odd_value_breaks_the_page(data: st.DataObject) -> None:
    simulation = copy.deepcopy(simulation_example())
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(places(simulation)))
        target = simulation
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = data.draw(st.sampled_from(ODD))
    page = render_report(simulation)
    root = read_page(page)
    for drawing in root.all("svg"):
        said = "".join(
            value for e in drawing.every() for key, value in e.attributes.items() if key == "d"
        )
        assert not re.search(r"nan|inf|None", said)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_by_day_and_by_night(page: str) -> None:
    def full(colour: str) -> str:
        return colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])

    themes = [
        {name: full(colour) for name, colour in re.findall(r"--([\w-]+):(#[0-9a-fA-F]+)", block)}
        for block in re.findall(r":root\{(--page:#[^}]*accent[^}]*)\}", page)
    ]
    assert len(themes) == 2
    for theme, time in zip(themes, ("day", "night"), strict=True):
        for ink in ("ink", "soft", "accent"):
            assert contrast(theme[ink], theme["card"]) >= 4.5
            assert contrast(theme[ink], theme["page"]) >= 4.5
        assert contrast(theme["on"], theme["accent"]) >= 4.5
        assert contrast(theme["warn"], theme["warn-bg"]) >= 4.5
        assert contrast(theme["ink"], theme["warn-bg"]) >= 4.5
        assert contrast(theme["axis"], theme["card"]) >= 3
        for key, look in LOOKS.items():
            if key != "other":  # outlined in the colour of the axes
                assert contrast(getattr(look, time), theme["card"]) >= 3, (key, time)


def test_series_of_one_figure_differ_in_more_than_colour() -> None:
    for keys in (
        ("ulysses", "wlb", "cluster", "tap", "tap_vrsp", "libra", "ideal"),
        ("before", "random", "theory", "greedy", "after", "bound"),
        ("samples", "tokens", "cost"),
        tuple(key for key in LOOKS if key.startswith("group")),
    ):
        shapes = {(LOOKS[key].mark, LOOKS[key].dash, LOOKS[key].width) for key in keys}
        assert len(shapes) == len(keys)


def test_the_same_simulation_gives_the_same_page(page: str, tmp_path: Path) -> None:
    write_report(simulation_example(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page


def test_without_jinja_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"libra-attention\[report\]"):
        render_report({})
