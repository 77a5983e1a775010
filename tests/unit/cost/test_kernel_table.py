"""Kernel tables: exact operations, interpolation, files, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost import KernelTable, read_kernel_table
from libra.cost.kernel_table import segment_flops, write_kernel_table
from tests.unit.cost.small_table import table


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 3))
def test_operations_count_every_pair_of_the_bottom_right_mask(
    q: int, more: int, heads: int
) -> None:
    k = q + more
    pairs = sum(1 for row in range(q) for key in range(k) if key <= row + more)
    forward = segment_flops(q, k, heads, 2, 3, direction="forward")
    assert forward == pairs * heads * 2 * (2 + 3)
    assert segment_flops(q, k, heads, 2, 3, direction="backward") == 2.5 * forward


def test_a_grid_point_gives_its_own_fraction_and_seconds() -> None:
    made = table()
    for i, q in enumerate((16, 256)):
        for j, ratio in enumerate((1, 4)):
            for k, heads in enumerate((1, 4)):
                fraction = 0.5 ** (1 + 4 * i + 2 * j + k)
                assert made.fraction(q, q * ratio, heads, direction="forward") == pytest.approx(
                    fraction
                )
                pairs = q * q * ratio - q * (q - 1) // 2
                assert made.seconds(q, q * ratio, heads, direction="forward") == pytest.approx(
                    pairs * heads * 10 / (1000 * fraction)
                )


def test_between_points_the_log_of_a_fraction_is_linear_in_the_logs() -> None:
    made = table()
    middle = made.fraction(64, 128, 2, direction="forward")  # half way on every axis, in logs
    assert middle == pytest.approx(0.5 ** np.arange(1, 9).mean())
    assert made.fraction(64, 64, 1, direction="forward") == pytest.approx(0.5**3)


def test_beyond_the_grid_a_fraction_stays_as_at_its_edge() -> None:
    made = table()
    assert made.fraction(1, 1, 1, direction="forward") == pytest.approx(0.5)
    assert made.fraction(4096, 10**6, 64, direction="forward") == pytest.approx(0.5**8)


def test_arguments_broadcast_and_an_empty_list_gives_an_empty_one() -> None:
    made = table()
    q, heads = np.array([1, 20, 300]), np.array([[1], [2]])
    seconds = made.seconds(q, 400, heads, direction="backward")
    assert seconds.shape == (2, 3) and seconds.dtype == np.float64
    for i, j in np.ndindex(2, 3):
        one = made.seconds(int(q[j]), 400, int(heads[i, 0]), direction="backward")
        assert seconds[i, j] == pytest.approx(float(one))
    assert made.seconds([], [], [], direction="forward").shape == (0,)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 1, 1), "q_len holds 0"),
        ((2, 1, 1), "k_len is less than q_len"),
        ((1, 1, -1), "heads holds -1"),
        ((1.5, 2, 1), "q_len has dtype float64"),
    ],
)
def test_segments_that_cannot_be_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table().seconds(*arguments, direction="forward")
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        table().seconds(1, 1, 1, direction="sideways")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"peak_flops": 0.0}, "peak_flops is 0.0"),
        ({"key_dim": 1.5}, "key_dim is 1.5"),
        ({"q_len": np.array([4, 4])}, "ascending"),
        ({"q_len": np.array([0, 4])}, "ascending numbers from 1"),
        ({"heads": np.array([1.5, 4])}, "integers"),
        ({"k_per_q": np.array([2.0, 4.0])}, "start at 1"),
        ({"k_per_q": np.array([np.nan, 4.0])}, r"k_per_q\[0\] is nan"),
        ({"forward": np.zeros((2, 2, 2))}, r"forward\[0, 0, 0\] is 0.0; it must be finite and > 0"),
        ({"backward": np.full((2, 2, 2), np.inf)}, "is inf; it must be finite and > 0"),
        ({"backward": np.ones((2, 2))}, r"shape \(2, 2\); it must be \(2, 2, 2\), from q_len"),
        ({"forward": np.full((2, 2, 2), "x")}, "must hold numbers"),
        ({"call_seconds": -1.0}, "call_seconds"),
        ({"matmul_flops": -1.0}, "matmul_flops"),
        ({"source": 3}, "source"),
    ],
)
def test_tables_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(**changes)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize("rate", [None, 3.5e14])
def test_a_table_comes_back_from_its_file_as_it_was(
    tmp_path: Path, suffix: str, rate: float | None
) -> None:
    made = table(source='a "quoted" ünit', matmul_flops=rate, call_seconds=1e-5)
    file = tmp_path / f"kernels{suffix}"
    write_kernel_table(made, file)
    back = read_kernel_table(file)
    for field in dataclasses.fields(KernelTable):
        assert np.array_equal(getattr(back, field.name), getattr(made, field.name)), field.name
    again = tmp_path / f"again{suffix}"
    write_kernel_table(back, again)
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"foward": []}, r"unknown key 'foward' \(did you mean 'forward'\?\) in the kernel table"),
        ({"version": 2}, "version 2; this libra reads version 1"),
        ({"format": "else"}, "not a kernel table"),
        ({"heads": None}, "heads holds object; it must hold numbers"),
        ({"q_len": [1, "x"]}, "must hold numbers"),
        ({"forward": [[1], [1, 2]]}, "forward cannot be read as numbers"),
        ({"peak_flops": "fast"}, "peak_flops is 'fast'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_key(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    file = tmp_path / "kernels.json"
    write_kernel_table(table(), file)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as error:
        read_kernel_table(file)
    assert "kernels.json" in str(error.value)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    for name, text, message in (
        ("none.json", None, "cannot read"),
        ("broken.json", "{", "cannot read"),
        ("broken.toml", "[", "cannot read"),
        ("list.json", "[]", "not a kernel table"),
        ("table.npy", "", "a .json or .toml file"),
        ("less.json", '{"format": "libra-kernel-table", "version": 1}', "lacks source, peak"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_kernel_table(tmp_path / name)
