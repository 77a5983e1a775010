"""House rules that a linter does not know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "libra"
TESTS = ROOT / "tests"
MOST_LINES = 400
MOST_FUNCTION_LINES = 60
# Compiled loops, tested through the module that calls them.
TESTED_THROUGH_THEIR_CALLER = {
    "data/packing_kernels.py",
    "data/pools_kernels.py",
    "plan/place_surplus_kernels.py",
}

# In pieces, so that this file keeps the rules itself.
MACHINE_PATHS = [rf"(?<![\w.])/{top}/\w" for top in ("work", "root", "home", "Users", "opt", "mnt")]
REGISTRIES = [
    re.escape(host)
    for host in (
        "pypi" + ".org",
        "python" + "hosted.org",
        "download.py" + "torch.org",
        "ana" + "conda.org",
        "registry." + "npm" + "js",
        "crates" + ".io",
    )
]
FORBIDDEN = re.compile("|".join(MACHINE_PATHS + REGISTRIES))
# Metadata on the wire is arrays, and files are read without running what they hold.
PICKLES = re.compile(
    r"^\s*(import|from)\s+(pickle|cloudpickle|dill)\b|allow_pickle\s*=\s*True"
    r"|\b(all_gather|gather|broadcast|scatter|send|recv)_object",
    re.MULTILINE,
)


def tracked_files() -> list[Path]:
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [file for name in listed.split("\0") if name and (file := ROOT / name).is_file()]


def text_of(file: Path) -> str:
    """The file as text; empty for a binary file."""
    data = file.read_bytes()
    return "" if b"\0" in data else data.decode("utf-8", errors="replace")


def test_no_source_file_is_longer_than_four_hundred_lines() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in SOURCE.rglob("*.py")}
    long = {str(file.relative_to(ROOT)): n for file, n in lengths.items() if n > MOST_LINES}
    assert long == {}


def test_charts_have_one_library() -> None:
    second = "matplot" + "lib"
    named = [
        str(file.relative_to(ROOT))
        for file in tracked_files()
        if file.suffix in (".py", ".toml") and second in text_of(file)
    ]
    assert named == []


def test_no_source_file_is_a_drawer_for_odds_and_ends() -> None:
    drawers = re.compile(r"utils?|helpers?|managers?|misc|common")
    assert [str(file) for file in SOURCE.rglob("*.py") if drawers.fullmatch(file.stem)] == []


def test_no_file_names_a_machine_path_or_a_package_registry() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match.group()}"
        for file in tracked_files()
        for number, line in enumerate(text_of(file).splitlines(), start=1)
        if (match := FORBIDDEN.search(line))
    ]
    assert found == []


def test_the_package_neither_reads_nor_sends_pickles() -> None:
    guilty = [
        str(file.relative_to(ROOT))
        for file in SOURCE.rglob("*.py")
        if PICKLES.search(file.read_text())
    ]
    assert guilty == []


@pytest.mark.parametrize(
    "text, bad",
    [
        ("see /wo" + "rk/x", True),
        ("--index https://py" + "pi.org/simple", True),
        ("out/wo" + "rk/x", False),
        ("https://host/home/page", False),
        ("a/b", False),
    ],
)
def test_the_rule_on_paths_and_registries_finds_what_it_should(text: str, bad: bool) -> None:
    assert (FORBIDDEN.search(text) is not None) == bad
