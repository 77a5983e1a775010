"""The report: one page that needs nothing but itself, whatever names the study holds."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from libra.extras import MissingPackageError
from libra.simulate.report import half_cost, render_report, write_report
from libra.simulate.results import LengthBins, Study, study_json
from tests.unit.simulate.page_reader import Element, read_page
from tests.unit.simulate.study_example import study_example

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&amp; {{ 7*7 }} ${7*7} é漢字\u2028<!--"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SECONDS = 90


@pytest.fixture(scope="module")
def page() -> str:
    return render_report(study_example())


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    write_report(hostile_study(), path)
    return path


@pytest.fixture(scope="module")
def root(page: str) -> Element:
    return read_page(page)


def the(root: Element, name: str, **wanted: str) -> Element:
    (found,) = root.all(name, **wanted)
    return found


def hostile_study() -> Study:
    """The example with a hostile name in every place that a user names."""
    study = study_example()
    settings = replace(
        study.settings,
        model=replace(study.settings.model, name=HOSTILE),
        cluster=replace(study.settings.cluster, name=HOSTILE),
        kernel_table=HOSTILE,
    )
    return replace(
        study,
        command=HOSTILE,
        corpus=replace(study.corpus, source=HOSTILE),
        settings=settings,
        recommendation=replace(study.recommendation, text=HOSTILE, line=HOSTILE),
        candidates=tuple(replace(row, problem=HOSTILE) for row in study.candidates),
        workers=replace(study.workers, title=HOSTILE),
        warnings=(HOSTILE,),
    )


def test_the_page_is_well_formed_and_its_anchors_exist_once(root: Element) -> None:
    names = [e.attributes["id"] for e in root.every() if "id" in e.attributes]
    assert len(names) == len(set(names))
    links = {e.attributes["href"].removeprefix("#") for e in the(root, "nav").all("a")}
    assert links == {"candidates", "corpus", "balance", "speed", "settings"}
    assert links <= set(names)
    assert the(root, "html").attributes["lang"] == "en"


def test_nothing_is_loaded_from_elsewhere_and_the_policy_says_so(root: Element) -> None:
    for element in root.every():
        assert element.name not in ("link", "iframe", "object", "embed", "base", "form")
        assert not {"style", "srcset", "action"} & set(element.attributes)
        assert element.attributes.get("src", "data:").startswith("data:")
        assert not [name for name in element.attributes if name.startswith("on")]
    assert not re.search(r"@import|url\(", the(root, "style").text)
    charts = the(root, "script", id="charts").text
    assert "http" not in charts
    policy = the(root, "meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy


def test_every_figure_has_a_title_a_caption_a_picture_and_its_numbers(root: Element) -> None:
    charts = json.loads(the(root, "script", id="charts").text)
    figures = root.all("figure")
    assert [figure.attributes["id"] for figure in figures] == list(charts)
    for figure in figures:
        title = the(figure, "h3").text
        assert title == charts[figure.attributes["id"]]["description"]
        assert the(figure, "figcaption").text
        assert the(the(figure, "noscript"), "img").attributes["alt"] == title
        table = the(the(figure, "details"), "table")
        rows = the(table, "tbody").all("tr")
        assert rows and len(the(table, "thead").all("th")) == len(rows[0].children)


def test_the_recommendation_comes_first_with_the_line_to_paste(root: Element) -> None:
    study = study_example()
    section = the(root, "main").children[0]
    assert the(section, "p", class_="lead").text == study.recommendation.text
    assert the(section, "pre").text == study.recommendation.line
    numbers = [e.text for e in section.all("strong")]
    assert numbers == ["1.52×", "5.58 s", "6.02M", "0.1%", "3.0%", "2.8%", "69.3 GB"]
    assert "share of attention" in section.text


def test_a_study_that_recommends_nothing_still_has_its_page() -> None:
    study = study_example()
    advice = replace(study.recommendation, candidate=None, line=None)
    rows = tuple(replace(row, fits=False) for row in study.candidates)
    root = read_page(render_report(replace(study, recommendation=advice, candidates=rows)))
    assert root.all("button", id="copy") == []
    assert root.all("tr", class_="best") == []


def test_candidates_can_be_sorted_by_number_and_the_best_is_marked(root: Element) -> None:
    table = the(root, "table", id="table")
    rows = the(table, "tbody").all("tr")
    assert len(rows) == len(study_example().candidates)
    (best,) = table.all("tr", class_="best")
    assert best is rows[6]
    status = [the(row, "td", class_="status").text for row in rows]
    assert status[6] == "recommended"
    assert status[-1] == "needs more memory than a GPU has"
    step = study_example().candidates[6].step_seconds
    assert float(best.children[3].attributes["data-v"]) == step


def test_warnings_and_settings_are_shown(root: Element) -> None:
    warned = [e.text for e in the(root, "section", class_="warn").all("li")]
    assert warned == list(study_example().warnings)
    settings = the(root, "section", id="settings").text
    for said in ("Qwen3-30B-A3B", "H100", "surplus", "262,144", "libra simulate lengths"):
        assert said in settings


def test_hostile_names_stay_text_and_stay_out_of_charts(hostile_page: Path) -> None:
    study = hostile_study()
    root = read_page(hostile_page.read_text(encoding="utf-8"))
    assert len(root.all("script")) == 2
    assert {e.attributes["src"][:5] for e in root.all("img")} == {"data:"}
    assert the(the(root, "main").children[0], "b").text == HOSTILE
    saved = the(root, "a", download="study.json").attributes["href"].split(",")[1]
    assert json.loads(base64.b64decode(saved)) == study_json(study)
    charts = json.loads(the(root, "script", id="charts").text)
    assert "onerror" not in json.dumps(charts)


def test_the_longest_samples_with_half_of_the_cost_are_named() -> None:
    bins = LengthBins(
        edges=(1, 2, 4, 8), samples=(6, 3, 1), tokens=(6, 9, 5), squares=(6.0, 20.0, 25.0)
    )
    assert half_cost(bins) == (2, 0.4, 45 / 51)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.extras.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"libra-attention\[report\]"):
        render_report(study_example())


# Uses the page as a reader would, and tells the page around it the outcome.
DRIVER = """
addEventListener("error", (event) => parent.postMessage({ error: event.message }, "*"));
setTimeout(() => {
  const boxes = [...document.querySelectorAll(".chart")];
  const heads = document.querySelectorAll("#table thead button");
  heads[3].click(); heads[3].click();
  const rows = [...document.querySelectorAll("#table tbody tr")];
  const text = document.querySelector("#pooling .role-axis-title text");
  parent.postMessage({
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    drawn: boxes.map((box) => box.querySelectorAll("svg").length),
    clipped: boxes.filter((box) => box.scrollWidth > box.clientWidth).length,
    ink: getComputedStyle(text).fill,
    sorted: rows.map((row) => Number(row.cells[3].dataset.v)),
  }, "*");
}, 2500);
"""


def browse(page: Path, profile: Path, *, dark: bool = False) -> tuple[str, list[str]]:
    """The document after its scripts ran, and the lines on the console."""
    command = [
        *(BROWSER or "", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-dev-shm-usage", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"),
        *("--window-size=1900,900", "--enable-logging=stderr", "--virtual-time-budget=9000"),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *("--dump-dom", page.as_uri()),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the browser did not answer in time")
    if done.returncode != 0:
        pytest.skip(f"the browser does not run here: {done.stderr[-300:]}")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no browser found")
def test_the_page_draws_its_charts_under_its_own_policy_without_a_word_on_the_console(
    hostile_page: Path, tmp_path: Path
) -> None:
    document, console = browse(hostile_page, tmp_path / "profile")
    assert console == []
    assert len(re.findall(r'<svg[^>]* class="marks"', document)) == len(
        re.findall("<figure", document)
    )


@pytest.mark.skipif(BROWSER is None, reason="no browser found")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_wide_and_narrow_screens_by_day_and_by_night(
    page: str, dark: bool, tmp_path: Path
) -> None:
    # The driver is a script of its own, which the policy would refuse.
    page = re.sub(r"<meta http-equiv=[^>]*>", "", page)
    page = f"<script>{DRIVER}</script>".join(page.rsplit("</body>", 1))
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    frames = "".join(
        f'<iframe src="report.html" width="{w}" height="800"></iframe>' for w in (400, 1400)
    )
    listen = (
        "addEventListener('message', (event) => { const told = document.createElement('pre');"
        "told.textContent = JSON.stringify(event.data); document.body.append(told); });"
    )
    outer = tmp_path / "frames.html"
    outer.write_text(
        '<!doctype html><meta name="color-scheme" content="light dark">'
        f"<style>iframe{{border:0}}</style><script>{listen}</script><body>{frames}</body>",
        encoding="utf-8",
    )
    document, console = browse(outer, tmp_path / "profile", dark=dark)
    assert console == []
    told: list[dict[str, Any]] = [
        json.loads(unescape(answer)) for answer in re.findall(r"<pre>(.*?)</pre>", document, re.S)
    ]
    assert sorted(answer["width"] for answer in told) == [400, 1400]
    for answer in told:
        assert answer["overflow"] <= 0 and answer["clipped"] == 0
        assert set(answer["drawn"]) == {1}
        assert answer["sorted"] == sorted(answer["sorted"], reverse=True)
        assert (answer["ink"] == "rgb(233, 237, 241)") == dark
