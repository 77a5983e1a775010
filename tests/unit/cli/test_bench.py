"""`libra bench`: what it refuses, in one line, before and after its ranks have met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from libra.cli.bench import BenchOptions, check_options, read_windows, settings
from libra.cli.main import main
from libra.config import PoolConfig

LENGTHS = str(Path(__file__).parents[2] / "data" / "lengths-code.npy")


def options(**changes: object) -> BenchOptions:
    return BenchOptions(what="attention", lengths=LENGTHS, **changes)  # type: ignore[arg-type]


def test_without_torchrun_the_command_to_type_is_told(monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "attention", LENGTHS]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("libra: libra bench runs under torchrun: torchrun --standalone")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "changes, world, message",
    [
        ({"cp": 3}, 2, "--cp 3 does not divide the 2 ranks"),
        ({"global_batch": 5}, 2, "--global-batch 5 is no multiple of 2 replicas"),
        ({"tokens": 0}, 2, "--tokens is 0"),
        ({"layers": 0}, 2, "--layers is 0"),
        ({"scheme": ()}, 2, "--scheme names no scheme"),
        ({"timeout": 0.0}, 2, "--timeout is 0"),
        ({"lengths": "-"}, 2, "standard input"),
        ({"kv_heads": 3}, 2, "kv must divide q"),
        ({"config": PoolConfig(pool_size=3)}, 4, "--config.pool-size 3 does not divide"),
        ({"config": PoolConfig(chunks=3)}, 2, "chunks"),
        ({"config": PoolConfig(pool_size=1, placement="ulysses")}, 2, "has no pools"),
        ({"heads": 6, "kv_heads": 2, "cp": 4, "global_batch": 4}, 4, "6"),
        ({"json": Path("no/such/folder/x.json")}, 2, "--json no/such/folder/x.json cannot"),
        ({"trace": Path()}, 2, "--trace . cannot be written"),
    ],
)
def test_options_that_no_rank_could_run_are_refused(changes, world, message) -> None:
    chosen = BenchOptions(what="attention", **{"lengths": LENGTHS} | changes)
    with pytest.raises(ValueError, match=message):
        check_options(chosen, world)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_defaults_run_on_any_small_number_of_ranks(world: int) -> None:
    check_options(options(), world)


def test_windows_are_the_first_of_the_corpus() -> None:
    one, two = read_windows(options(windows=1), 2), read_windows(options(windows=2), 2)
    assert len(two) == 2 and len(two[0]) == 8
    assert (one[0].lengths == two[0].lengths).all()


def test_a_corpus_with_too_few_windows_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.full(20, 1000))
    few = BenchOptions(
        what="attention", lengths=str(tmp_path / "few.npy"), tokens=1000, global_batch=8, windows=3
    )
    with pytest.raises(ValueError, match="fills only 2 of 8 packs"):
        read_windows(few, 2)


def test_settings_are_plain_values() -> None:
    found = settings(options(json=Path("x.json")))
    assert json.loads(json.dumps(found))["config"]["chunks"] == 4
    assert found["json"] == "x.json" and found["wlb"]["most_tokens"] == 1.5


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
def test_a_run_writes_figures_and_a_trace(tmp_path: Path) -> None:
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    sizes = "--tokens 512 --global-batch 4 --windows 1 --scheme ulysses ring libra"
    outputs = ["--json", str(figures), "--trace", str(trace)]
    done = run_bench(2, LENGTHS, *sizes.split(), *outputs)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Ulysses" in done.stdout and "Libra" in done.stdout
    found = json.loads(figures.read_text())
    assert list(found["schemes"]) == ["ulysses", "ring", "libra"]
    assert [len(each["steps"]) for each in found["schemes"].values()] == [2, 2, 2]
    assert found["schemes"]["ulysses"]["speedup"] == 1
    events = json.loads(trace.read_text())["traceEvents"]
    shown = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in shown} == set(range(6))  # three schemes on two ranks
    assert {"attend", "attend_backward", "dispatch"} <= {event["name"] for event in shown}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in shown)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_one_rank_cannot_read_ends_all_ranks_alike(tmp_path: Path) -> None:
    done = run_bench(2, str(tmp_path / "none.npy"))
    assert done.returncode == 1  # torchrun's own; each rank ends with 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("libra: ")]
    assert len(set(lines)) == 1  # torchrun may end the second rank before it has told
    assert "none.npy cannot be read" in lines[0]
    assert "exitcode  : 2" in done.stderr
