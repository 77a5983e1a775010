"""The slow-link benchmark in real network namespaces, where this machine lets it make them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.slow.network import missing

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "slow_link.py"
SMALL = "--tokens 1024 --repeats 1 --heads 4 --kv-heads 4 --head-dim 32 --rates 200"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _able() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


def running(mark: str) -> list[str]:
    """Command lines of all processes that hold `mark`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line and int(file.parent.name) != os.getpid():
            found.append(line)
    return found


def until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.timeout(280)
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_measures_every_rate_and_chunk_count_and_leaves_nothing(
    tmp_path: Path, ranks: int
) -> None:
    spaces = subprocess.run(["ip", "netns"], capture_output=True, check=True).stdout
    links = sorted(os.listdir("/sys/class/net"))
    figures = tmp_path / "figures.json"
    command = f"{SMALL} --chunks 1 4 --ranks {ranks} --json {figures}"
    subprocess.run([sys.executable, str(PROGRAM), *command.split()], check=True, timeout=260)
    rows = json.loads(figures.read_text())["figures"]
    shown = [(row["rate"], row["chunks"], row["way"]) for row in rows]
    assert shown == [
        (rate, chunks, way)
        for rate, chunks in ((None, 4), (200, 1), (200, 4))
        for way in ("forward", "backward")
    ]
    for row in rows:
        assert row["sent"] > 0 and row["step"] >= row["attended"] > 0
        assert row["first"] >= 0 and row["middle"] >= 0 and row["last"] >= 0
    slow = [row for row in rows if row["rate"] == 200]
    # 200 Mbit/s is 25 MB/s: the limit holds, up to the bucket and what other links carry meanwhile.
    assert all(row["transfer"] > 0.5 * row["sent"] / 25e6 / (ranks - 1) for row in slow)
    assert subprocess.run(["ip", "netns"], capture_output=True, check=True).stdout == spaces
    assert sorted(os.listdir("/sys/class/net")) == links


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whatever_ends_it_leaves_no_process_and_no_namespace(
    tmp_path: Path, ending: signal.Signals
) -> None:
    spaces = subprocess.run(["ip", "netns"], capture_output=True, check=True).stdout
    mark = str(tmp_path / "never-written.json")
    endless = SMALL.replace("--repeats 1", "--repeats 1000").replace("1024", "1153")
    options = f"{endless} --chunks 4".split()
    of_ranks = "slow/rank.py --rank"
    command = [sys.executable, str(PROGRAM), *options, "--json", mark]
    program = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:

        def ranks() -> list[str]:
            return [line for line in running(of_ranks) if "--tokens 1153" in line]

        assert until(lambda: len(ranks()) == 2 or program.poll() is not None, 60)
        assert len(running(mark)) == 3  # the program, `unshare` and the program inside it
        time.sleep(1.5)
        program.send_signal(ending)
        assert program.wait(20) != 0
        assert until(lambda: running(mark) + ranks() == [], 20), running(mark) + ranks()
    finally:
        program.kill()
        program.wait()
    assert subprocess.run(["ip", "netns"], capture_output=True, check=True).stdout == spaces
