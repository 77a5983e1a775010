"""Python blocks of README and the guide print the output that follows them, and the figures that
README counts from plans are those of the planner.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import libra
from libra.cli.main import main
from tests.pools import real_pool

ROOT = Path(__file__).parents[2]
WITH_OUTPUT = re.compile(r"```python[^\n]*\n([^`]*)```\n+```text\n(.*?)```", re.DOTALL)


def blocks_with_output() -> list[tuple[str, str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        (page.name, code, output)
        for page in pages
        for code, output in WITH_OUTPUT.findall(page.read_text(encoding="utf-8"))
    ]


BLOCKS = blocks_with_output()


def test_readme_and_the_guide_have_blocks_that_run() -> None:
    assert {"README.md", "quickstart.md", "data-and-sampling.md"} <= {name for name, *_ in BLOCKS}


@pytest.mark.parametrize("page, code, output", BLOCKS, ids=[name for name, *_ in BLOCKS])
def test_a_block_prints_the_output_that_the_page_shows(page: str, code: str, output: str) -> None:
    # As if torch were not installed: planning does not need it.
    program = "import sys\nsys.modules['torch'] = None\n" + code
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


COUNTED = {
    "256K": (262_144, 128, 8, libra.HeadShape(q=128, kv=16, dim=256)),
    "1M": (1_048_576, 32, 16, libra.HeadShape(q=128, kv=4, dim=256)),
}
"""Tokens of a pack, packs of a window, CP and heads of the pools whose plans README counts."""
PAPER = {
    "256K": libra.PoolConfig(placement="paper", head_shards=4, block_size=4096),
    "1M": libra.PoolConfig(placement="paper", head_shards=4, block_size=8192),
}


def counted_rows() -> list[tuple[str, str, str, str]]:
    """Pool, placement, busiest worker over mean, and GB moved, of README's table of plans."""
    _, table = (ROOT / "README.md").read_text(encoding="utf-8").split("### Counted from plans")
    rows = re.findall(r"^\| ([^|]*?) ?\| ([^|]+) \| ([\d.]+) \| (\d+) \|", table, re.MULTILINE)
    found = []
    for pool, placement, busiest, moved in rows:
        pool = pool.split(",")[0] or found[-1][0]
        found.append((pool, placement, busiest, moved))
    return found


@pytest.mark.parametrize("pool, placement, busiest, moved", counted_rows())
def test_plans_have_the_balance_and_bytes_that_readme_counts(
    pool: str, placement: str, busiest: str, moved: str
) -> None:
    tokens, global_batch, cp_size, heads = COUNTED[pool]
    bounds = real_pool(tokens, global_batch)
    if placement == "Ulysses":  # every pack in its own CP group
        config = libra.PoolConfig(pool_size=1, placement="ulysses", chunks=1)
        groups = [[pack] for pack in bounds]
    else:
        config = libra.PoolConfig() if placement == "Libra" else PAPER[pool]
        groups = [bounds]
    plans = [
        libra.plan_pool(group, cp_size=cp_size, config=config, heads=heads) for group in groups
    ]
    load = np.concatenate([plan.load for plan in plans])
    assert f"{load.max() / load.mean():.2f}" == busiest
    assert f"{sum(plan.traffic.sum() for plan in plans) / 1e9:.0f}" == moved


def test_readme_counts_six_plans_and_names_the_figures_of_its_picture() -> None:
    rows = counted_rows()
    assert len(rows) == 6
    caption = (ROOT / "README.md").read_text(encoding="utf-8").split("## How it works")[0]
    picture = (ROOT / "docs" / "figures" / "pool-256k.svg").read_text(encoding="utf-8")
    for busiest in (rows[0][2], rows[2][2]):
        assert f"{busiest} times the mean" in " ".join(caption.split())
        assert f"{busiest}×" in picture


@pytest.mark.slow
def test_the_simulator_gives_the_steps_that_the_pages_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Of the pool sizes only the one that the simulator recommends, which changes no scheme.
    lengths = ROOT / "tests" / "data" / "lengths-code.npy"
    assert main(["simulate", str(lengths), "--pool-sizes", "4"]) == 0
    shown = capsys.readouterr().out
    steps = dict(re.findall(r"^│ (Ulysses|Libra|ideal) +│ ([\d.]+ s) │", shown, re.MULTILINE))
    speedups = dict(re.findall(r"^│ (Libra|ideal) .* ([\d.]+x) │$", shown, re.MULTILINE))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    ulysses = "[Ulysses](https://arxiv.org/abs/2309.14509)"
    assert f"takes {steps['Libra']} where {ulysses} takes {steps['Ulysses']}" in readme
    assert f"{speedups['Libra']} over Ulysses" in readme
    assert f"would give {speedups['ideal']}" in readme
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    for scheme, step in steps.items():
        assert re.search(rf"^{scheme} +{step} ", page, re.MULTILINE)
    assert "Take P=4 B=4096 H=1: a step of 26.23 s" in shown and "a step of 26.23 s" in page


@pytest.mark.slow
def test_the_training_script_of_the_quickstart_runs_on_two_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (code,) = re.findall(r'```python title="quick.py"\n(.*?)```', page, re.DOTALL)
    (tmp_path / "quick.py").write_text(code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(tmp_path / "quick.py")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (output,) = re.findall(r"```text\n(busiest rank.*?)```", page, re.DOTALL)
    assert done.stdout == output
