"""Costs from lengths, and what is refused as lengths, bounds and counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.data.lengths import (
    causal_pairs,
    check_cu_seqlens,
    check_lengths,
    segment_workloads,
    workloads,
)


def test_the_workload_of_a_pack_is_the_sum_of_its_squared_lengths() -> None:
    assert workloads([[3, 4, 1], []]).tolist() == [26, 0]  # the second holds padding only


def test_a_sample_of_two_to_the_31_tokens_has_an_exact_workload() -> None:
    assert workloads([[2**31]]).tolist() == [2**62]
    longest = np.array([2**31 - 1], dtype=np.uint32)
    assert workloads([longest]).tolist() == [(2**31 - 1) ** 2]


def test_a_workload_that_would_pass_an_int64_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2147483648 tokens.*2\^63"):
        workloads([[2**31, 2**31]])


@given(st.lists(st.lists(st.integers(1, 2**20), max_size=6), max_size=6))
def test_workloads_of_many_packs_are_those_of_each(packs: list[list[int]]) -> None:
    assert workloads(packs).tolist() == [sum(n * n for n in pack) for pack in packs]


def test_empty_packs_weigh_nothing_wherever_they_stand() -> None:
    offsets = np.array([0, 0, 2, 2, 3, 3])
    assert segment_workloads(np.array([2, 3, 5]), offsets).tolist() == [0, 13, 0, 25, 0]


def test_an_error_in_one_of_many_packs_says_which() -> None:
    with pytest.raises(ValueError, match=r"pack 1\[2\] is 0"):
        workloads([[1], [4, 5, 0]])
    with pytest.raises(ValueError, match="pack 0 has shape"):
        workloads([5, 6])  # type: ignore[list-item]


@given(st.integers(0, 300), st.integers(0, 300))
def test_causal_pairs_count_each_query_with_the_keys_before_it(start: int, more: int) -> None:
    assert int(causal_pairs(start, start + more)) == sum(q + 1 for q in range(start, start + more))


def test_causal_pairs_are_vectorised_and_exact_for_the_longest_sample() -> None:
    pairs = causal_pairs([0, 2, 2**31], [4, 2, 2**31])
    assert pairs.dtype == np.int64
    assert pairs.tolist() == [10, 0, 0]
    assert int(causal_pairs(0, 2**31)) == 2**31 * (2**31 + 1) // 2


@pytest.mark.parametrize(
    "given",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], dtype=np.uint32),
        np.array([3, 1, 2], dtype=np.uint64),
        np.array([9, 3, 9, 1, 9, 2], dtype=np.int16)[1::2],
        torch.tensor([3, 1, 2], dtype=torch.int32),
        [np.int64(3), 1, torch.tensor(2)],
    ],
)
def test_lengths_are_read_from_anything_that_holds_integers(given: object) -> None:
    checked = check_lengths(given)  # type: ignore[arg-type]
    assert checked.dtype == np.int64
    assert checked.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([1, 0, 2], r"lengths\[1\] is 0; a sample has 1 to 2\^31 tokens"),
        ([1, 2, -7], r"lengths\[2\] is -7"),
        ([2**31 + 1], r"lengths\[0\] is 2147483649"),
        ([4, 2.0], r"lengths\[1\] is 2.0; it must be an integer"),
        ([4, True], r"lengths\[1\] is True"),
        ([4, "5"], r"lengths\[1\] is '5'"),
        ([4, None], r"lengths\[1\] is None"),
        ([[1, 2], [3]], r"lengths\[0\] is \[1, 2\]"),
        ([2**70], r"lengths\[0\] is 1180591620717411303424"),
        (np.array([1.0, 2.5]), r"lengths\[1\] is 2.5 \(dtype float64\)"),
        (np.array([1.0, 2.0, np.nan]), r"lengths\[2\] is nan"),
        (np.array([1.0, 2.0]), r"lengths\[0\] is 1.0 \(dtype float64\)"),
        (np.array([True, False]), r"lengths\[0\] is True \(dtype bool\)"),
        (np.array(["1", "2"]), r"lengths\[0\] is '1'"),
        (np.array([1, None, 2.5], dtype=object), r"lengths\[1\] is None \(dtype object\)"),
        (np.array([1, 2**63], dtype=np.uint64), r"lengths\[1\] is 9223372036854775808"),
        (np.ones((2, 2), dtype=np.int64), r"lengths has shape \(2, 2\)"),
        (7, r"lengths has shape \(\)"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "lengths cannot be read"),
    ],
)
def test_what_are_no_lengths_is_refused_with_the_first_offender(
    wrong: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_lengths(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        [0, 3, 7],
        np.array([0, 3, 7], dtype=np.int32),
        torch.tensor([0, 3, 7], dtype=torch.int32),
        [0, 0, 3, 3, 3, 7, 7],  # zero-length samples are dropped
    ],
)
def test_bounds_come_back_strictly_ascending(given: object) -> None:
    bounds = check_cu_seqlens(given, tokens=7)  # type: ignore[arg-type]
    assert bounds.dtype == np.int64
    assert bounds.tolist() == [0, 3, 7]


def test_rows_after_the_last_bound_are_padding() -> None:
    assert check_cu_seqlens([0, 3], tokens=8).tolist() == [0, 3]
    assert check_cu_seqlens([0], tokens=8).tolist() == [0]
    assert check_cu_seqlens([0, 0], tokens=8).tolist() == [0]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([], "cu_seqlens is empty"),
        ([1, 4], "cu_seqlens starts at 1; it must start at 0"),
        ([0, 5, 3, 8], "falls from 5 to 3 at index 2: sample 1 would have -2 tokens"),
        ([0, 5, 9], "cu_seqlens ends at 9 but the pack has 8 tokens"),
        ([0.0, 5.0], r"cu_seqlens\[0\] is 0.0"),
        ([[0, 5]], r"cu_seqlens\[0\] is \[0, 5\]"),
        (np.array([[0, 5]]), r"cu_seqlens has shape \(1, 2\)"),
        (np.array([0.0, np.nan]), r"cu_seqlens\[1\] is nan"),
    ],
)
def test_bounds_that_describe_no_samples_are_refused(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens(wrong, tokens=8)  # type: ignore[arg-type]


def test_bounds_longer_than_any_pack_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 2\^31 tokens"):
        check_cu_seqlens([0, 2**31 + 1])
