"""`libra bench`: its table and files, and what ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from libra.bench.options import BenchOptions
from libra.bench.results import BenchResult, compare
from libra.cli.bench import print_result
from libra.cli.main import main
from libra.simulate.schemes import SCHEMES
from tests.unit.bench.test_results import LIBRA, TIMES

LENGTHS = str(Path(__file__).parents[2] / "data" / "lengths-code.npy")


def test_without_torchrun_the_command_to_type_is_told(monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "attention", LENGTHS]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("libra: libra bench runs under torchrun: torchrun --standalone")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("times", [TIMES, {"libra": LIBRA}])
def test_the_table_names_schemes_and_says_that_tap_does_not_overlap(times) -> None:
    result = BenchResult(
        created="2026-12-01",
        machine="a CPU",
        ranks=2,
        dp=2,
        kernel="cpu",
        dtype="float32",
        settings=BenchOptions(what="attention", lengths=LENGTHS, json=Path("x.json")),
        names={key: SCHEMES[key].label for key in times},
        schemes=compare(times),
    )
    text = StringIO()
    print_result(result, Console(file=text, width=140))
    assert "Libra" in text.getvalue()
    assert "without overlap: chunks=1" in text.getvalue()
    assert ("2.00x" in text.getvalue()) == ("ulysses" in times)
    settings = json.loads(json.dumps(asdict(result), default=str))["settings"]
    assert settings["config"]["chunks"] == 4 and settings["wlb"]["most_tokens"] == 1.5
    assert settings["json"] == "x.json"


def run_bench(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        str(ranks),
        "-m",
        "libra.cli.main",
        "bench",
        "attention",
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_writes_results_and_a_trace_of_each_rank(tmp_path: Path) -> None:
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    sizes = "--tokens 512 --global-batch 4 --windows 1 --scheme ulysses ring libra"
    outputs = ["--json", str(figures), "--trace", str(trace)]
    done = run_bench(2, LENGTHS, *sizes.split(), *outputs)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Ulysses" in done.stdout and "Libra" in done.stdout
    found = json.loads(figures.read_text())
    assert list(found["schemes"]) == ["ulysses", "ring", "libra"]
    assert [len(each["steps"]) for each in found["schemes"].values()] == [2, 2, 2]
    assert found["schemes"]["ulysses"]["of_ulysses"]["speedup"] == 1
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {"Ulysses", "ring, zigzag", "Libra"} <= names
        assert {"libra::attend", "libra::attend_backward", "libra::dispatch"} <= names


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_one_rank_cannot_read_ends_all_ranks_alike(tmp_path: Path) -> None:
    done = run_bench(2, str(tmp_path / "none.npy"))
    assert done.returncode == 1  # torchrun's own; each rank ends with 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("libra: ")]
    assert len(set(lines)) == 1  # torchrun may end the second rank before it has told
    assert "none.npy cannot be read" in lines[0]
    assert "exitcode  : 2" in done.stderr
