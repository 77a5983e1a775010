"""`libra calibrate`: what it measures, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra.cli.main import main
from libra.cost import read_kernel_table
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
    monkeypatch.setattr("libra.cli.calibrate.GRIDS", {**GRIDS, "cpu-quick": TINY})
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
