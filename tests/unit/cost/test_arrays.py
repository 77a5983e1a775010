"""The check of arrays of numbers: what it takes, and the place that it names."""

from __future__ import annotations

import numpy as np
import pytest

from libra.cost.arrays import check_array


def test_numbers_become_float64_and_are_copied() -> None:
    given = np.arange(3.0)
    array = check_array("x", given, shape=(3,), shape_from="y")
    assert array.dtype == np.float64 and array.tolist() == [0, 1, 2]
    assert not np.shares_memory(array, given)
    assert check_array("x", [[1, 2]]).dtype == np.float64


@pytest.mark.parametrize(
    "values, options, message",
    [
        ([[1], [1, 2]], {}, "x cannot be read as numbers"),
        (["fast"], {}, "x holds <U4; it must hold numbers"),
        ([True], {}, "x holds bool"),
        ([1, 2], {"shape": (3,), "shape_from": "dp"}, r"shape \(2,\); it must be \(3,\), from dp"),
        ([[0, 1], [2, -1]], {}, r"x\[1, 1\] is -1.0; it must be finite and >= 0"),
        ([1, np.inf], {}, r"x\[1\] is inf"),
        ([1, np.nan], {}, r"x\[1\] is nan"),
        ([1, 0], {"zero": False}, r"x\[1\] is 0.0; it must be finite and > 0"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(values, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_array("x", values, **options)
