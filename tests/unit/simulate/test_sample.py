"""Choosing windows of a long corpus, and what they tell of the rest."""

from __future__ import annotations

import numpy as np
import pytest

from libra.simulate.sample import WindowSample, estimate, every_window, sample_windows


def test_strata_give_their_share_of_windows_of_like_skew() -> None:
    skew = np.random.default_rng(0).permutation(100).astype(float)
    sample = sample_windows(skew, 20, seed=1)
    assert (np.diff(sample.windows) > 0).all() and sample.sizes.tolist() == [20] * 5
    assert np.bincount(sample.stratum).tolist() == [4] * 5
    assert (skew[sample.windows] // 20 == sample.stratum).all()
    assert sample.windows.tolist() == sample_windows(skew, 20, seed=1).windows.tolist()
    assert sample.windows.tolist() != sample_windows(skew, 20, seed=2).windows.tolist()


def test_a_sample_as_large_as_the_corpus_is_the_corpus() -> None:
    sample = sample_windows([3.0, 1.0, 2.0], 7)
    assert sample.windows.tolist() == [0, 1, 2]
    found = estimate(np.array([1.0, 2.0, 6.0]), sample)
    assert (found.mean, found.low, found.high, found.most) == (3.0, 3.0, 3.0, 6.0)


@pytest.mark.parametrize(
    "skew, count, message",
    [
        ([1.0, float("nan")], 1, "finite"),
        ([], 1, "skew"),
        ([1.0, 2.0, 3.0], 0, "count"),
        ([1.0, 2.0, 3.0], 1, "count"),
    ],
)
def test_samples_that_tell_nothing_are_refused(skew: list[float], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_windows(skew, count)


def test_estimates_follow_the_textbook() -> None:
    sample = WindowSample(
        windows=np.arange(5), stratum=np.array([0, 0, 1, 1, 1]), sizes=np.array([6, 4])
    )
    values = np.array([1.0, 3.0, 10.0, 11.0, 12.0])
    found = estimate(values, sample)
    assert found.mean == pytest.approx(0.6 * 2 + 0.4 * 11)
    variance = 0.36 * (2 / 2) * (1 - 2 / 6) + 0.16 * (1 / 3) * (1 - 3 / 4)
    assert found.high - found.mean == pytest.approx(3.182 * variance**0.5, rel=0.01)  # t with 3
    assert found.most == 12


def test_intervals_hold_the_corpus_mean_about_as_often_as_they_say() -> None:
    source = np.random.default_rng(0)
    skew = source.lognormal(0, 1, 200)
    values = skew + source.normal(0, 0.3, 200)
    held, widths, plain = 0, [], []
    for seed in range(300):
        sample = sample_windows(skew, 40, seed=seed)
        found = estimate(values[sample.windows], sample)
        held += found.low <= values.mean() <= found.high
        widths.append(found.high - found.low)
        simple = WindowSample(
            windows=source.permutation(200)[:40], stratum=np.zeros(40, int), sizes=np.array([200])
        )
        alone = estimate(values[simple.windows], simple)
        plain.append(alone.high - alone.low)
    assert held / 300 > 0.85
    assert np.mean(widths) < 0.6 * np.mean(plain)  # what the strata are for


def test_every_window_counts() -> None:
    assert every_window(3).sizes.tolist() == [3]
