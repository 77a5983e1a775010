"""The tables of a plan: rows of workers or of replicas, and columns that fit the terminal."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from libra.cli.plan import PlanOptions, run_plan
from libra.config import PoolConfig


def shown(options: PlanOptions, width: int = 120) -> str:
    screen = StringIO()
    assert run_plan(options, Console(file=screen, width=width)) == 0
    return screen.getvalue()


def test_up_to_32_workers_have_a_row_each_and_more_are_shown_by_replica(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([64, *[16] * 12]))
    small: dict[str, Any] = {"lengths": path, "tokens": 64, "global_batch": 4, "heads": 16}
    config = PoolConfig(pool_size=4, chunks=1)
    few = shown(PlanOptions(**small, cp=8, config=config))
    assert "Workers:" in few
    assert "Extremes" not in few
    many = shown(PlanOptions(**small, cp=16, config=config))
    assert "Workers:" not in many
    assert "48-63" in many
    for words in (
        "heaviest load planned",
        "sends most",
        "most extra memory",
        "largest workspace",
        "kernel segments",
    ):
        assert words in many


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_is_cut_off(tmp_path: Path, width: int) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("64, 32, 32, 100, 16, 16, 16, 16, 40, 24")
    text = shown(
        PlanOptions(
            lengths=lengths,
            tokens=64,
            cp=2,
            global_batch=4,
            heads=8,
            kv_heads=2,
            config=PoolConfig(pool_size=2),
        ),
        width,
    )
    assert "…" not in text
    assert ("K, V" in text.split("Placements")[0]) == (width == 120)
