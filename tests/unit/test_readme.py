"""Python blocks of README and the guide that are followed by their output print exactly that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_OUTPUT = re.compile(r"```python[^\n]*\n(.*?)```\n+```text\n(.*?)```", re.DOTALL)


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
    assert "busiest rank / mean" in done.stdout
