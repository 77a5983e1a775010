"""The kernel table of a calibration: which calls are measured, and the fractions that follow."""

from __future__ import annotations

import pytest

from libra.simulate.calibrate import EMPTY, Grid, Shape, fit_table

TINY = Grid(
    q_len=(1, 8, 64),
    k_per_q=(1, 2, 4),
    heads=(1, 2),
    rows=64,
    longest=100,
    flops=1e6,
    matmul_size=64,
)


def test_fractions_are_of_the_operations_of_whole_calls() -> None:
    shapes = {shape for _, shape in TINY.points(dim=4, heads_per_kv=2)}
    seconds = {EMPTY: (1e-3, 2e-3)} | dict.fromkeys(shapes, (5e-3, 4e-3))
    table = fit_table(TINY, seconds, peak=1e9, source="none", dim=4, heads_per_kv=2)
    # 64 rows a call; 1e6 operations allow them all here.
    assert shapes >= {Shape(64, 1, 2, 2, 1), Shape(8, 8, 32, 1, 1), Shape(1, 64, 64, 2, 1)}
    # 64 x 4 keys pass the longest and take the fraction of the longest below.
    assert not any(shape.k_len > 100 for shape in shapes)
    assert table.forward[2, 2, 0] == table.forward[2, 1, 0] == table.forward[2, 0, 0]
    pairs = 8 * (8 * 32 - 28)  # eight segments of eight rows and 32 keys
    assert table.forward[1, 2, 1] == pytest.approx(pairs * 2 * 16 / 4e-3 / 1e9)
    assert table.backward[1, 2, 1] == pytest.approx(2.5 * pairs * 2 * 16 / 2e-3 / 1e9)
    assert table.call_seconds == 1e-3


def test_a_call_has_no_more_operations_than_a_point_may_cost() -> None:
    small = Grid(
        q_len=(8,), k_per_q=(1,), heads=(1,), rows=64, longest=8, flops=1300.0, matmul_size=8
    )
    ((_, shape),) = small.points(dim=4, heads_per_kv=1)
    assert shape.count * shape.q_len == 16  # 36 pairs x 16 operations a segment: two fit
