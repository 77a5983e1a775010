"""The picture of a plan: both formats, the same every time, and what stands in it."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from libra.cli.choose_pool import choose_pool
from libra.cli.plan_plot import draw_plan, plan_figure
from libra.cli.plan_report import PlanReport, report_plan
from libra.config import HeadShape, PoolConfig
from libra.cost import CLUSTERS, AttentionTime, published_table

pytest.importorskip("matplotlib")


def figures_of(packs: list[list[int]], *, cp_size: int, q: int = 8) -> PlanReport:
    tokens, cluster = packs[0][-1], CLUSTERS["h100"]
    lengths = np.concatenate([np.diff(pack) for pack in packs])
    report, _ = report_plan(
        choose_pool(lengths, tokens=tokens, global_batch=len(packs), pool_size=len(packs)),
        tokens=tokens,
        cp_size=cp_size,
        config=PoolConfig(pool_size=len(packs), chunks=1),
        heads=HeadShape(q=q, kv=q // 2, dim=8),
        attention=AttentionTime(cluster=cluster, table=published_table(cluster)),
    )
    return report


@pytest.fixture(scope="module")
def figures() -> PlanReport:
    return figures_of([[0, 1024], [0, 256, 512, 1024]], cp_size=2)


def test_svg_and_png_are_written_by_suffix(figures: PlanReport, tmp_path: Path) -> None:
    draw_plan(figures, tmp_path / "plan.svg")
    draw_plan(figures, tmp_path / "plan.png")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert root.tag.endswith("svg")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_plan_gives_the_same_bytes(figures: PlanReport, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw_plan(figures, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_bars_are_the_loads_and_the_cells_are_the_traffic(figures: PlanReport) -> None:
    load, traffic, _ = plan_figure(figures).axes
    heights = [bar.get_height() for bar in load.containers[1]]
    assert heights == pytest.approx(figures.placed.load / figures.placed.load.mean())
    cells = traffic.images[0].get_array()
    moved = sum(figures.traffic.values())
    assert (np.ma.filled(cells, 0) == moved).all()
    assert (np.ma.getmaskarray(cells) == (moved == 0)).all()


def test_before_is_the_baseline_and_mean_and_target_are_marked(figures: PlanReport) -> None:
    load, _, _ = plan_figure(figures).axes
    words = [text.get_text() for text in load.get_legend().get_texts()]
    assert words == ["before (Ulysses)", "after (Libra, surplus)", "target, 1.03", "mean"]
    before = [bar.get_height() for bar in load.containers[0]]
    assert before[0] == before[1]  # Ulysses balances inside a replica


def test_where_ulysses_cannot_run_before_is_the_load_at_home() -> None:
    odd = figures_of([[0, 96], [0, 48, 96]], cp_size=3, q=2)
    assert odd.ulysses is None
    load, _, _ = plan_figure(odd).axes
    assert load.get_legend().get_texts()[0].get_text() == "before (at home)"


def test_a_pool_that_sends_nothing_and_one_of_many_workers_can_be_drawn(tmp_path: Path) -> None:
    draw_plan(figures_of([[0, 64]], cp_size=1), tmp_path / "alone.png")
    many = figures_of([[0, 2112], *([[0, *range(64, 2113, 64)]] * 16)], cp_size=8)
    draw_plan(many, tmp_path / "many.png")
    assert not plan_figure(many).axes[0].containers  # one area in place of 136 bars


def test_without_matplotlib_the_extra_is_named(
    figures: PlanReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"libra-attention\[plot\]"):
        draw_plan(figures, tmp_path / "plan.svg")
