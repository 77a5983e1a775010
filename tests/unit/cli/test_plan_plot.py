"""The picture of a plan: both formats, the same every time, and what stands in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from libra.cli.choose_pool import choose_pool
from libra.cli.plan_plot import draw_plan, plan_picture
from libra.cli.plan_report import PlanReport, report_plan
from libra.cli.units import byte_unit
from libra.config import HeadShape, PoolConfig
from libra.cost import CLUSTERS, AttentionTime, published_table


def figures_of(packs: list[list[int]], *, cp_size: int, q: int = 8) -> PlanReport:
    tokens, cluster = packs[0][-1], CLUSTERS["h100"]
    lengths = np.concatenate([np.diff(pack) for pack in packs])
    return report_plan(
        choose_pool(lengths, tokens=tokens, global_batch=len(packs), pool_size=len(packs)),
        tokens=tokens,
        cp_size=cp_size,
        config=PoolConfig(pool_size=len(packs), chunks=1),
        heads=HeadShape(q=q, kv=q // 2, dim=8),
        attention=AttentionTime(cluster=cluster, table=published_table(cluster)),
    )


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


def test_steps_are_the_loads_and_cells_are_the_traffic(figures: PlanReport) -> None:
    steps, cells = _steps(figures), _cells(figures)
    load = figures.placed.load / figures.placed.load.mean()
    after = [row["y"] for row in steps if row["series"] == "after (Libra, surplus)"]
    assert after == pytest.approx([*load, load[-1]])
    moved = figures.plan.traffic.sum(axis=0)
    unit = byte_unit(moved.max()).bytes
    drawn = np.zeros(moved.shape)
    for cell in cells:
        drawn[round(cell["y"] * figures.plan.cp_size), round(cell["x"] * figures.plan.cp_size)] = (
            cell["sent"]
        )
    assert drawn * unit == pytest.approx(moved)


def test_title_and_steps_use_one_measure(figures: PlanReport) -> None:
    before = [row["y"] for row in _steps(figures) if row["series"] == "before (Ulysses)"]
    assert before[0] == before[1]  # Ulysses balances inside a replica
    peak = figures.placed.load.max() / figures.placed.load.mean()
    title = plan_picture(figures)["hconcat"][0]["title"]["text"]
    assert title == f"Busiest worker / mean: {max(before):.2f}× → {peak:.2f}× (target 1.03)"


def test_where_ulysses_cannot_run_before_is_the_load_at_home() -> None:
    odd = figures_of([[0, 96], [0, 48, 96]], cp_size=3, q=2)
    assert odd.ulysses is None
    assert {row["series"] for row in _steps(odd)} >= {"before (at home)"}


def test_a_pool_that_sends_nothing_and_one_of_many_workers_can_be_drawn(tmp_path: Path) -> None:
    draw_plan(figures_of([[0, 64]], cp_size=1), tmp_path / "alone.png")
    many = figures_of([[0, 2112], *([[0, *range(64, 2113, 64)]] * 16)], cp_size=8)
    draw_plan(many, tmp_path / "many.png")
    assert 0 < len(_cells(many)) <= 17 * 17  # of replicas in place of 136 workers


def _steps(figures: PlanReport) -> list[dict[str, Any]]:
    return _rows(figures, plan_picture(figures)["hconcat"][0]["layer"][0])


def _cells(figures: PlanReport) -> list[dict[str, Any]]:
    return _rows(figures, plan_picture(figures)["hconcat"][1])


def _rows(figures: PlanReport, part: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = plan_picture(figures)["datasets"][part["data"]["name"]]
    return rows
