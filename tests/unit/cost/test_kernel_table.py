"""Kernel tables: exact operations, interpolation, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost.kernel_table import segment_flops
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
        ({"k_per_q": np.array([np.nan, 4.0])}, "start at 1|ascending"),
        ({"forward": np.zeros((2, 2, 2))}, "finite fractions > 0"),
        ({"backward": np.full((2, 2, 2), np.inf)}, "finite fractions > 0"),
        ({"backward": np.ones((2, 2))}, r"shape \(2, 2\)"),
        ({"forward": np.full((2, 2, 2), "x")}, "must hold numbers"),
        ({"call_seconds": -1.0}, "call_seconds"),
        ({"matmul_flops": -1.0}, "matmul_flops"),
        ({"source": 3}, "source"),
    ],
)
def test_tables_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(**changes)
