"""The report in a real browser: no error, and its script does what it should at three widths."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from libra.simulate.report import render_report
from tests.unit.simulate.simulation_example import simulation_example

pytest.importorskip("jinja2")

WIDTHS = (375, 800, 1400)
BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
SECONDS = 90

# Uses the page as a reader would, and tells the page around it what came of that.
DRIVER = """
addEventListener("error", (event) => parent.postMessage({ error: event.message }, "*"));
setTimeout(() => {
  const at = (id) => document.getElementById(id);
  const seen = (svg) => svg.getClientRects().length > 0;
  const shown = (id) => [...at(id).querySelectorAll(".plot-svg")].filter(seen);
  const plot = (id) => at(id).querySelector(".plot");
  const press = (id, key) => {
    plot(id).dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  };
  const told = { width: innerWidth, overflow: document.documentElement.scrollWidth - innerWidth };
  told.drawings = shown("pooling").map((svg) => svg.getAttribute("class").split(" ").pop());
  for (const key of ["Home", "ArrowRight", "ArrowRight"]) press("pooling", key);
  told.tip = at("pooling").querySelector(".tip").innerText;
  told.said = at("pooling").querySelector(".say").textContent;
  press("pooling", "Escape");
  told.hidden = at("pooling").querySelector(".tip").hidden;
  const box = shown("tradeoff")[0].getBoundingClientRect();
  const [clientX, clientY] = [box.left + box.width * 0.93, box.top + box.height * 0.77];
  const move = new PointerEvent("pointermove", { clientX, clientY, bubbles: true });
  plot("tradeoff").dispatchEvent(move);
  told.hover = at("tradeoff").querySelector(".tip").innerText;
  const legend = at("pooling").querySelector(".legend button");
  legend.click();
  told.pressed = legend.getAttribute("aria-pressed");
  told.gone = at("pooling").querySelectorAll(".gone").length;
  at("lengths").querySelector("[data-scale=log]").click();
  told.view = at("lengths").querySelector("g.v:not(.off)").dataset.v;
  const heads = document.querySelectorAll(".sortable thead button");
  heads[3].click(); heads[3].click();
  const rows = [...document.querySelectorAll(".sortable tbody tr")];
  told.sorted = rows.map((row) => Number(row.cells[3].dataset.v));
  told.order = heads[3].parentElement.getAttribute("aria-sort");
  told.stops = document.querySelectorAll(".plot[tabindex='0']").length;
  const smallest = shown("pooling")[0].querySelector(".tk").getBoundingClientRect().height;
  told.letters = smallest;
  parent.postMessage(told, "*");
}, 100);
"""


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The document after its scripts ran, and what the console said."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",  # a root user has none
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
        "--window-size=1440,900",
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=4000",
        "--dump-dom",
        page.as_uri(),
    ]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its children end with it
    )
    try:
        document, log = started.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip("the browser did not answer in time")
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    if started.returncode != 0:
        pytest.skip(f"the browser does not run here: {log[-300:]}")
    return document, [line for line in log.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no browser found")
@pytest.mark.parametrize("simulation", [simulation_example(), {}], ids=["full", "empty"])
def test_the_page_runs_under_its_own_policy_without_a_word_on_the_console(
    simulation: dict[str, Any], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_report(simulation), encoding="utf-8")
    document, console = browse(page, tmp_path / "profile")
    assert console == []
    assert re.search(r'<html[^>]*class="js"', document)
    assert document.count('role="group"') >= (10 if simulation else 0)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the driver saw at each width."""
    if BROWSER is None:
        pytest.skip("no browser found")
    folder = tmp_path_factory.mktemp("driven")
    page = re.sub(r"<meta http-equiv=[^>]*>", "", render_report(simulation_example()))
    page = page.replace("</body>", f"<script>{DRIVER}</script></body>")
    (folder / "report.html").write_text(page, encoding="utf-8")
    frames = "".join(
        f'<iframe src="report.html" width="{width}" height="800"></iframe>' for width in WIDTHS
    )
    listen = (
        "<script>addEventListener('message', (event) => {"
        "const told = document.createElement('pre');"
        "told.textContent = JSON.stringify(event.data); document.body.append(told); });</script>"
    )
    outer = folder / "frames.html"
    outer.write_text(
        f"<!doctype html><html><head><style>iframe{{border:0}}</style>{listen}</head>"
        f"<body>{frames}</body></html>",
        encoding="utf-8",
    )
    document, console = browse(outer, folder / "profile")
    assert console == []
    answers = [json.loads(unescape(a)) for a in re.findall(r"<pre>(.*?)</pre>", document, re.S)]
    assert [answer for answer in answers if "error" in answer] == []
    assert sorted(answer["width"] for answer in answers) == sorted(WIDTHS)
    return {answer["width"]: answer for answer in answers}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_its_width_and_words_stay_readable(
    told: dict[int, dict[str, Any]], width: int
) -> None:
    seen = told[width]
    assert seen["overflow"] <= 0
    assert seen["drawings"] == ["narrow" if width < 560 else "wide"]
    assert seen["letters"] >= 11


@pytest.mark.parametrize("width", WIDTHS)
def test_tooltips_follow_the_keyboard_and_the_pointer(
    told: dict[int, dict[str, Any]], width: int
) -> None:
    seen = told[width]
    assert seen["stops"] == 10
    assert seen["tip"].startswith("P: 8") and "0.5%" in seen["tip"]
    assert seen["said"].startswith("P 8, ")
    assert seen["hidden"] is True
    assert seen["hover"].startswith("candidate: P = 32")


@pytest.mark.parametrize("width", WIDTHS)
def test_legend_scale_and_headings_are_switches(
    told: dict[int, dict[str, Any]], width: int
) -> None:
    seen = told[width]
    assert seen["pressed"] == "false" and seen["gone"] == 4  # two drawings of two scales
    assert seen["view"] == "log"
    assert seen["order"] == "descending"
    assert seen["sorted"] == sorted(seen["sorted"], reverse=True)
