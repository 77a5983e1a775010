"""`libra calibrate`: what it measures, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libra.cli.main import main
from libra.cost import read_kernel_table
from libra.runtime import measure
from libra.runtime.measure import Repeats, attention_seconds, find_machine, matmul_rate
from libra.simulate.calibrate import GRIDS, Grid

TINY = Grid(
    q_len=(1, 8, 64),
    k_per_q=(1, 2, 4),
    heads=(1, 2),
    rows=64,
    longest=100,
    flops=1e6,
    matmul_size=64,
)


def test_a_quick_calibration_of_a_cpu_writes_a_table_that_the_simulator_reads(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("libra.cli.calibrate.GRIDS", {**GRIDS, ("cpu", True): TINY})
    file = tmp_path / "kernels.toml"
    words = ["calibrate", "--quick", "--device", "cpu", "--head-dim", "16", "--out", str(file)]
    assert main(words) == 0
    table = read_kernel_table(file)
    assert (table.key_dim, table.value_dim) == (16, 16)
    assert table.matmul_flops == table.peak_flops > 0
    assert table.call_seconds > 0
    assert "CPU" in table.source and "float32" in table.source
    assert (table.seconds([1, 8, 64], 64, 2, direction="forward") > 0).all()
    shown = capsys.readouterr().out
    assert "GFLOP/s" in shown and "kernels.toml" in shown


def test_the_cpu_is_really_timed() -> None:
    machine = find_machine("cpu", kernel=None, dtype=None)
    assert machine.dtype == torch.float32 and machine.device.type == "cpu"
    few = Repeats(warm_up=1, least=2, most=2)
    shape = {"q_len": 64, "k_len": 128, "heads": 4, "kv_heads": 2, "dim": 16}
    one = attention_seconds(machine, count=1, **shape, repeats=few)
    many = attention_seconds(machine, count=64, **shape, repeats=few)
    assert many[0] > 4 * one[0] > 0 and many[1] > 4 * one[1] > 0
    assert matmul_rate(machine, 128, repeats=few) > 1e7


def test_repeats_stop_at_the_most_or_when_their_time_is_up(monkeypatch) -> None:
    clock = iter(np.arange(0, 1000, 0.5))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(clock)))
    calls: list[int] = []
    repeats = Repeats(warm_up=2, least=3, most=20, seconds=0.5)
    seconds = measure.median_seconds(lambda: calls.append(1), torch.device("cpu"), repeats)
    assert seconds == 0.5 and len(calls) == 1 + 3  # the first warm-up took all of the time
    calls.clear()
    measure.median_seconds(
        lambda: calls.append(1), torch.device("cpu"), Repeats(warm_up=0, most=4, seconds=1e9)
    )
    assert len(calls) == 4


@pytest.mark.parametrize(
    "words, message",
    [
        ("--out kernels.npy", "a kernel table is a .json or .toml file"),
        ("--out no/such/folder/k.json", "cannot be written"),
        ("--head-dim 0", "--head-dim is 0"),
        ("--heads-per-kv 0", "--heads-per-kv is 0"),
        ("--dtype int8", "dtype is 'int8'; choose one of bfloat16"),
        ("--kernel flash3", "kernel='flash3' does not serve device cpu"),
    ],
)
def test_options_that_cannot_be_used_end_in_one_line_and_code_2(
    tmp_path: Path, monkeypatch, capsys, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "--quick", *words.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("libra: ") and message in errors and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is usable here"):
        find_machine("cuda", kernel=None, dtype=None)
    with pytest.raises(ValueError, match="choose cpu or cuda"):
        find_machine("tpu", kernel=None, dtype=None)
