"""`libra plan`: what it reads, prints and writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.cli.choose_pool import choose_pool
from libra.cli.main import main
from libra.cli.simulate import SimulateOptions, make_study
from libra.cli.units import show_bytes, show_seconds
from libra.config import HeadShape, PoolConfig
from libra.corpus import load_lengths
from libra.plan.plan_pool import plan_pool
from libra.plan.traffic_bound import traffic_bound

CODE = Path(__file__).parents[2] / "data" / "lengths-code.npy"
# Four packs of 64 tokens and a sample that fits none: two pools of two, CP 2.
LENGTHS = [64, 32, 32, 100, 16, 16, 16, 16, 40, 24]
SMALL = "--tokens 64 --cp 2 --global-batch 4 --heads 8 --kv-heads 2 --head-dim 4 --bytes 4"
POOL = "--config.pool-size 2 --config.chunks 2 --config.block-size 8"


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text(", ".join(map(str, LENGTHS)))
    return path


def plan(lengths: Path, words: str = "") -> int:
    return main(["plan", str(lengths), *SMALL.split(), *POOL.split(), *words.split()])


def test_text_and_npy_of_the_same_lengths_give_the_same_plan(lengths: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS, dtype=np.uint16))
    found = []
    for name in ("lengths.txt", "lengths.npy"):
        assert plan(tmp_path / name, f"--json {tmp_path / 'out' / 'plan.json'}") == 0
        found.append(json.loads((tmp_path / "out" / "plan.json").read_text()))
        del found[-1]["planning_seconds"], found[-1]["corpus"]["file"]
    assert found[0] == found[1]


def test_the_header_counts_packs_samples_tokens_workers_and_what_was_dropped(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(lengths) == 0
    out = capsys.readouterr().out
    for words in (
        "10 samples, 1 longer than a pack dropped; 4 packs of 64 tokens",
        "4 packs in 2 pools of 2",
        "2 packs, 5 samples, 128 tokens, 4 workers (CP 2)",
        "planned in",
    ):
        assert words in out


def test_the_figures_are_those_of_the_planner(lengths: Path, tmp_path: Path) -> None:
    assert plan(lengths, f"--json {tmp_path / 'plan.json'}") == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    # By decreasing workload the packs are 0, 3, 1, 2: the first pool takes the ends.
    assert found["corpus"]["pool_packs"] == [0, 2]
    expected = plan_pool(
        [[0, 64], [0, 16, 32, 48, 64]],
        cp_size=2,
        config=PoolConfig(pool_size=2, chunks=2, block_size=8),
        heads=HeadShape(q=8, kv=2, dim=4, bytes=4),
    )
    workers = found["per_worker"]
    assert workers["load"] == expected.load.tolist()
    assert workers["home_load"] == expected.home_load.tolist()
    assert found["imbalance"]["planned"] == pytest.approx(expected.imbalance)
    for kind, moved in zip(("q", "kv", "o"), expected.traffic, strict=True):
        assert found["traffic"][kind] == moved.tolist()
        assert workers["sent"][kind] == moved.sum(axis=1).tolist()
        assert workers["received"][kind] == moved.sum(axis=0).tolist()
    assert [p["placement"] for p in found["placements"]] == ["surplus", "paper", "ulysses"]
    assert found["placements"][0]["total_traffic"] == expected.traffic.sum()
    for kind, moved in zip(("do", "q", "kv", "dq", "dkv"), expected.backward_traffic, strict=True):
        assert found["backward_traffic"][kind] == moved.tolist()
        assert workers["backward_sent"][kind] == moved.sum(axis=1).tolist()
        assert workers["backward_received"][kind] == moved.sum(axis=0).tolist()
        assert found["placements"][0]["backward_traffic"][kind] == moved.sum()
    for word, moved in (("", expected.traffic), ("backward_", expected.backward_traffic)):
        between = moved.sum(axis=0)
        assert found["placements"][0][f"worst_{word}sent"] == between.sum(axis=1).max()
        assert found["placements"][0][f"worst_{word}received"] == between.sum(axis=0).max()
    bound = traffic_bound(expected)
    assert found["bound"] == {"traffic": bound, "ratio": expected.traffic.sum() / bound}


def test_the_summary_shows_bytes_of_both_passes_the_bound_and_the_modelled_times(
    lengths: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert plan(lengths, f"--config.backward refetch --json {tmp_path / 'plan.json'}") == 0
    out = " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "plan.json").read_text())
    placed, modelled = found["placements"][0], found["modelled"]
    for word, total in (("forward", "total_traffic"), ("backward", "total_backward_traffic")):
        worst = "worst_backward" if word == "backward" else "worst"
        assert (
            f"{word} {show_bytes(placed[total])}; the busiest worker sends "
            f"{show_bytes(placed[f'{worst}_sent'])} and receives "
            f"{show_bytes(placed[f'{worst}_received'])}"
        ) in out
        assert f"{word} {show_seconds(modelled[word]['makespan'])}: compute" in out
    assert placed["total_backward_traffic"] > placed["total_traffic"]  # Q, K and V once more
    assert (
        f"a balance within 0.03 costs at least {show_bytes(found['bound']['traffic'])} forward; "
        f"this plan moves {found['bound']['ratio']:.2f} times that"
    ) in out


def test_plan_and_simulate_give_a_pool_the_same_seconds(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[cluster]\npreset = "a100"\nbetween_nodes = 20e9\n[model]\npreset = "qwen3-8b"\n'
        "[parallelism]\ndp = 8\ncp = 4\ntp = 2\nglobal_batch = 16\ntokens = 65536\n"
    )
    words = ["plan", str(CODE), "--cluster", str(file), "--json", str(tmp_path / "plan.json")]
    assert main([*words, "--config.pool-size", "4", "--window", "1"]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())

    options = SimulateOptions(lengths=str(CODE), cluster=str(file), pool_sizes=(4,))
    setting = make_study(options).setting
    chosen = choose_pool(load_lengths(CODE), tokens=65536, global_batch=16, pool_size=4, window=1)
    simulated = setting.time(
        plan_pool(
            chosen.cu_seqlens,
            cp_size=setting.parallelism.cp,
            config=setting.config,
            heads=setting.heads,
            tokens=65536,
        )
    )
    assert found["modelled"]["forward"]["makespan"] == simulated.forward_seconds > 0
    assert found["modelled"]["backward"]["makespan"] == simulated.backward_seconds > 0


def test_where_balance_may_cost_nothing_there_is_no_ratio(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    even, path = tmp_path / "even.txt", tmp_path / "plan.json"
    even.write_text("32 " * 8)
    assert plan(even, f"--json {path}") == 0
    assert json.loads(path.read_text())["bound"] == {"traffic": 0, "ratio": None}
    assert "a balance within 0.03 may cost no traffic" in capsys.readouterr().out


def test_ulysses_shares_each_pack_evenly_over_its_replica(lengths: Path, tmp_path: Path) -> None:
    assert plan(lengths, f"--json {tmp_path / 'plan.json'}") == 0
    ulysses = json.loads((tmp_path / "plan.json").read_text())["placements"][2]
    packs = [8 * 64 * 65 // 2, 8 * 4 * 16 * 17 // 2]
    assert ulysses["load"] == [packs[0] // 2] * 2 + [packs[1] // 2] * 2


def test_the_trace_and_the_plot_are_written_where_asked(lengths: Path, tmp_path: Path) -> None:
    trace, plot = tmp_path / "new" / "trace.json", tmp_path / "plan.svg"
    assert plan(lengths, f"--trace {trace} --plot {plot}") == 0
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])
    assert "<svg" in plot.read_text()


def test_heads_that_ulysses_cannot_share_leave_its_row_out(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(lengths, "--cp 3 --heads 4 --config.chunks 1") == 0
    out = capsys.readouterr().out
    assert "Ulysses needs query heads that divide by CP" in out
    assert "with Ulysses" not in out


@pytest.mark.parametrize("placement", ["paper", "ulysses"])
def test_other_placements_can_be_planned_and_compared(
    lengths: Path, placement: str, tmp_path: Path
) -> None:
    size = 1 if placement == "ulysses" else 2
    words = f"--config.placement {placement} --config.pool-size {size}"
    assert plan(lengths, f"{words} --json {tmp_path / 'plan.json'}") == 0
    placed = json.loads((tmp_path / "plan.json").read_text())["placements"]
    assert placed[0]["placement"] == placement
    assert {p["placement"] for p in placed} == {"surplus", "paper", "ulysses"}


def test_the_pool_of_real_lengths_has_its_known_figures(tmp_path: Path) -> None:
    assert main(["plan", str(CODE), "--json", str(tmp_path / "plan.json")]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["corpus"]["dropped_samples"], found["corpus"]["packs"]) == (130, 2019)
    placed = {p["placement"]: p for p in found["placements"]}
    assert placed["ulysses"]["imbalance"] == pytest.approx(5.328, abs=5e-4)
    assert placed["paper"]["imbalance"] == pytest.approx(0.7007, abs=5e-5)
    assert placed["paper"]["total_traffic"] == pytest.approx(354.18e9, rel=1e-4)
    assert placed["surplus"]["imbalance"] <= 0.03 + 1e-9
    assert placed["surplus"]["total_traffic"] <= 45e9
    assert placed["surplus"]["total_traffic"] == placed["surplus"]["total_backward_traffic"]
    assert found["bound"]["ratio"] >= 1
    for direction in ("forward", "backward"):
        line = found["modelled"][direction]
        assert line["makespan"] >= max(line["compute"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 0", "libra: --tokens is 0; it must be an integer >= 1"),
        ("--cp -2", "libra: --cp is -2; it must be an integer >= 1"),
        ("--window 1", "libra: --window 1 does not exist: 4 packs of 64 tokens make 1 windows"),
        ("--pool 2", "libra: --pool 2 does not exist: a window has 2 pools"),
        ("--pool -1", "libra: --pool is -1; it must be an integer >= 0"),
        ("--global-batch 3", "libra: a window of 3 packs"),
        ("--kv-heads 3", "libra: 8 query heads over 3 key/value heads"),
        ("--cluster h900", "libra: cluster has no preset 'h900'; there are a100, h100"),
        ("--cluster none.toml", "libra: cannot read none.toml"),
        ("--kernels none.json", "libra: cannot read kernel table none.json"),
        ("--config.chunks 3", "libra: a head shard of 8 query heads"),
        ("--plot plan.pdf", "libra: --plot plan.pdf ends in '.pdf'; name a file that ends in .svg"),
        ("--json .", "libra: --json . is a folder"),
        ("--trace /dev/null/trace.json", "libra: --trace /dev/null/trace.json cannot be written"),
    ],
)
def test_unusable_options_end_in_one_line_and_code_2(
    lengths: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(lengths, words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("words", ["--config.pool-size 0", "--config.chunks x", "--pool x"])
def test_settings_that_cannot_be_made_end_in_code_2(
    lengths: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        plan(lengths, words)
    assert exit_info.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_plot_without_altair_is_refused_before_anything_is_planned(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("libra.extras.find_spec", lambda name: None)
    assert plan(lengths, "--plot plan.svg") == 2
    captured = capsys.readouterr()
    assert "libra-attention[report]" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no sample length"),
        (b"  \n", "holds no sample length"),
        (b"1 2\n3, four", "line 2: 'four' is no integer"),
        (b"1 2.5", "line 1: '2.5' is no integer"),
        (b"5 0 7", r"line 1: 0 is no length; a sample has 1 to 2\^31 tokens"),
        (b"1 -2", "line 1: -2 is no length"),
        (bytes(range(256)), "neither of a known binary format nor text"),
        (b"\x93NUMPY\x01\x00cut short", "is no .npy array of integers"),
    ],
)
def test_files_that_hold_no_lengths_say_so(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_lengths(path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, 2.0]), "holds float64"),
        (np.ones((2, 2), dtype=np.int64), r"shape \(2, 2\)"),
        (np.array([True]), "holds bool"),
        (np.array([1, "a"], dtype=object), "holds Python objects"),
        (np.array([2**40]), "row 0: 1099511627776 is no length"),
    ],
)
def test_arrays_that_hold_no_lengths_say_so(tmp_path: Path, array: Any, message: str) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        load_lengths(path)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        load_lengths(tmp_path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_lengths(tmp_path / "missing.npy")


def test_help_names_every_option_and_imports_neither_torch_nor_altair() -> None:
    code = (
        "import sys\nfrom libra.cli.main import main\ntry: main(['plan', '--help'])\n"
        "except SystemExit: print({'torch', 'altair', 'numba'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for option in ("--tokens", "--config.pool-size", "--cluster", "--kernels FILE", "--trace FILE"):
        assert option in run.stdout
    assert run.stdout.splitlines()[-1] == "set()"


def test_an_output_never_overwrites_the_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100 200 300\n")
    assert main(["plan", str(lengths), "--json", str(lengths)]) == 2
    assert "must be different files" in capsys.readouterr().err
    assert lengths.read_text() == "100 200 300\n"
