"""The length histogram: exact counts and sums in bins, quantiles to a bin's width."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.simulate.histogram import bin_edges, count_lengths

some_lengths = st.lists(st.integers(1, 2**31) | st.integers(1, 100), min_size=1, max_size=60)


def test_bins_cover_every_length_once_and_are_at_most_a_ninth_wide() -> None:
    edges = bin_edges()
    assert edges[0] == 1 and edges[-1] == 2**31 + 1
    assert (np.diff(edges) > 0).all()
    assert edges[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    low, high = edges[:-1], edges[1:] - 1
    assert (high - low <= low / 9).all()
    assert {2**i for i in range(32)} <= set(edges.tolist())


@given(some_lengths)
def test_every_sample_and_token_is_counted_in_its_bin(lengths: list[int]) -> None:
    found = count_lengths(np.array(lengths))
    edges = bin_edges()
    for i in np.flatnonzero(found.samples):
        inside = [n for n in lengths if edges[i] <= n < edges[i + 1]]
        assert (found.samples[i], found.tokens[i]) == (len(inside), sum(inside))
    assert found.samples.sum() == len(lengths)
    assert found.tokens.sum() == sum(lengths)
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    assert found.mean == sum(lengths) / len(lengths)


@given(some_lengths, some_lengths)
def test_histograms_add_up(some: list[int], more: list[int]) -> None:
    nothing = count_lengths(np.empty(0, dtype=np.int64))
    added = nothing + count_lengths(np.array(some)) + count_lengths(np.array(more))
    assert added.as_dict() == count_lengths(np.array(some + more)).as_dict()


@given(some_lengths, st.floats(0, 1))
def test_a_quantile_lies_in_the_bin_of_the_true_one(lengths: list[int], q: float) -> None:
    found = count_lengths(np.array(lengths)).quantile(q)
    true = float(np.quantile(lengths, q, method="inverted_cdf"))
    edges = bin_edges()
    assert np.searchsorted(edges, found, "right") == np.searchsorted(edges, true, "right")


@pytest.mark.parametrize("q", [0.01, 0.5, 0.9, 0.999])
def test_quantiles_of_many_samples_are_near_the_true_ones(q: float) -> None:
    lengths = np.random.default_rng(0).lognormal(6.4, 1.2, 100_000).astype(np.int64) + 1
    found = count_lengths(lengths)
    assert found.quantile(q) == pytest.approx(np.quantile(lengths, q), rel=0.02)
    ascending = np.sort(lengths)
    true = ascending[np.searchsorted(np.cumsum(ascending), q * lengths.sum())]
    assert found.token_quantile(q) == pytest.approx(true, rel=0.05)


def test_the_least_and_the_greatest_are_exact() -> None:
    found = count_lengths(np.array([1000, 1001, 99_999]))
    assert (found.quantile(0), found.quantile(1)) == (1000, 99_999)


def test_the_dictionary_goes_through_json_and_runs_from_the_first_bin_to_the_last() -> None:
    found = count_lengths(np.array([3, 3, 5])).as_dict()
    assert json.loads(json.dumps(found)) == {
        "from": [3, 4, 5],
        "to": [3, 4, 5],
        "samples": [2, 0, 1],
        "tokens": [6, 0, 5],
        "shortest": 3,
        "longest": 5,
    }


def test_nothing_has_no_quantile() -> None:
    nothing = count_lengths(np.empty(0, dtype=np.int64))
    assert nothing.as_dict()["samples"] == []
    assert nothing.mean == 0
    with pytest.raises(ValueError, match="no sample has been counted"):
        nothing.quantile(0.5)
    with pytest.raises(ValueError, match="q is 2"):
        count_lengths(np.array([1])).quantile(2)
