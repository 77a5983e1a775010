"""Packing by cost: every sample kept, packs of similar cost, no pack above its limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.baselines.wlb import pack_by_cost


def packed_lengths(
    lengths: list[int], packs: int, most: int, linear_tokens: float = 0.0
) -> list[list[int]]:
    held = pack_by_cost(np.array(lengths), packs, most, linear_tokens=linear_tokens)
    return [np.array(lengths)[pack].tolist() for pack in held]


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    packs=st.integers(1, 8),
    linear=st.floats(0, 1e4),
)
def test_packing_by_cost_keeps_every_sample_and_the_limit(
    lengths: list[int], packs: int, linear: float
) -> None:
    most = max(1000, -(-2 * sum(lengths) // packs))
    packed = packed_lengths(lengths, packs, most, linear)
    assert len(packed) == packs
    assert sorted(length for pack in packed for length in pack) == sorted(lengths)
    assert max(map(sum, packed)) <= most


def test_packing_by_cost_puts_short_samples_where_no_long_one_is() -> None:
    assert packed_lengths([100, 10, 10, 10], 2, 100) == [[100], [10, 10, 10]]


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([11], "a sample has 11 tokens, more than most_tokens=10"),
        ([6, 6, 6], "2 packs of at most 10 tokens cannot take a sample of 6 more"),
    ],
)
def test_packing_by_cost_refuses_what_does_not_fit(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_by_cost(np.array(lengths), 2, 10, linear_tokens=1.0)
