"""The demo from its command to its figures, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra.cli.main import main


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks, cp", [(2, 1), (4, 2)])
def test_the_demo_trains_both_schemes_to_the_same_losses(
    ranks: int, cp: int, tmp_path: Path
) -> None:
    sizes = f"--ranks {ranks} --cp {cp} --steps 2 --tokens 512 --out {tmp_path}"
    assert main(["demo", *sizes.split()]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["largest_loss_difference"] < 1e-5
    assert len(summary["loss"]["libra"]) == 2
    assert summary["loss"]["libra"][-1] < summary["loss"]["libra"][0]
    assert sum(summary["forward_bytes_moved"]["libra"].values()) > 0
    assert summary["attention_speedup"]["predicted"] > 0.95  # the target leaves 3% of slack
