"""The generator: what it promises of its stream, and the paper's pool imbalances."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.synthetic import (
    CORPUS_1M,
    CORPUS_256K,
    MODELS,
    PAPER,
    POOL_SIZES,
    LengthModel,
    cut_to,
    generate_lengths,
    generate_tokens,
    generated_packs,
    window_best_fit,
    windows_of,
)
from libra.simulate.pooling import PoolCurve, pool_curve

MIX = Path(__file__).parents[2] / "data" / "lengths-mix.npy"
PACKS_AND_SEEDS = {"256K": (12_800, (0, 1)), "1M": (8192, (0, 1))}

PLAIN = LengthModel(
    median=500, sigma=0.5, tail_share=0.2, alpha=1.0, tail_start=10_000, longest=100_000
)


def drawn(model: LengthModel, samples: int, *, seed: int = 0) -> list[int]:
    return np.concatenate(list(generate_lengths(model, samples, seed=seed))).tolist()


def test_more_samples_start_like_fewer_and_no_limit_goes_on() -> None:
    lengths = np.concatenate(list(itertools.islice(generate_lengths(PLAIN, seed=3), 3)))
    assert len(lengths) == 3 << 18
    for samples in (1000, 300_000, 2 << 18):
        assert lengths[:samples].tolist() == drawn(PLAIN, samples, seed=3)


def test_enough_tokens_are_drawn_and_not_many_more() -> None:
    lengths = generate_tokens(PLAIN, 1e9, seed=0)
    assert 1e9 <= lengths.sum() and lengths[: -(1 << 18)].sum() < 1e9


def test_seeds_differ() -> None:
    assert drawn(PLAIN, 100, seed=0) != drawn(PLAIN, 100, seed=1)


@pytest.mark.parametrize("model", [CORPUS_256K, CORPUS_1M])
def test_lengths_have_the_published_median_and_reach_l(model: LengthModel) -> None:
    lengths = np.array(drawn(model, 1_500_000))
    assert abs(np.median(lengths) - 644) < 10
    assert 1 <= lengths.min() and model.longest * 0.99 < lengths.max() <= model.longest


@pytest.mark.parametrize("run", [1.0, 4.0])
def test_tail_samples_have_their_share_whatever_their_runs(run: float) -> None:
    model = dataclasses.replace(PLAIN, tail_run=run)
    tail = np.array(drawn(model, 1 << 20)) >= model.tail_start
    assert tail.mean() == pytest.approx(0.2, rel=0.02)
    follows = tail[1:][tail[:-1]].mean()  # a run of mean n ends after a tail sample in 1 of n
    alone = 1 - np.exp(np.log1p(-0.2) / run)  # another run begins there
    assert follows == pytest.approx(1 - (1 / run) * (1 - alone), abs=0.03)


def test_the_tail_is_a_truncated_pareto_with_an_atom() -> None:
    model = dataclasses.replace(PLAIN, tail_share=0.5, at_longest=0.25)
    lengths = np.array(drawn(model, 1 << 20))
    tail = lengths[lengths >= model.tail_start]
    assert (tail == model.longest).mean() == pytest.approx(0.25, abs=0.005)
    rest = tail[tail < model.longest]
    below = (1 - (10_000 / 30_000)) / (1 - (10_000 / 100_000))  # its distribution function at 30000
    assert (rest < 30_000).mean() == pytest.approx(below, abs=0.005)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"median": 0}, "median is 0"),
        ({"sigma": float("nan")}, "sigma is nan"),
        ({"sigma": -0.1}, "sigma"),
        ({"alpha": 0}, "alpha is 0.*> 0"),
        ({"tail_share": 1}, "tail_share is 1.*below 1"),
        ({"tail_share": -0.1}, "tail_share"),
        ({"at_longest": 1.5}, "at_longest is 1.5"),
        ({"tail_run": 0.5}, "tail_run is 0.5"),
        ({"tail_start": 0}, "tail_start is 0"),
        ({"tail_start": 200_000}, "tail_start is 200000.*at most longest=100000"),
        ({"longest": 2**31 + 1}, "longest"),
    ],
)
def test_what_no_distribution_has_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize("arguments", [{"samples": 0}, {"seed": -1}])
def test_bad_counts_are_refused_before_the_first_sample(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        generate_lengths(PLAIN, **{"samples": 10, **arguments})


@pytest.fixture(scope="module")
def curves() -> dict[tuple[str, int], list[PoolCurve]]:
    """Every column of the paper's table, one curve a seed."""
    found: dict[tuple[str, int], list[PoolCurve]] = {}
    for name, (count, seeds) in PACKS_AND_SEEDS.items():
        for seed in seeds:
            packs = generated_packs(MODELS[name], count, seed)
            for batch in (batch for corpus, batch in PAPER if corpus == name):
                found.setdefault((name, batch), []).append(
                    pool_curve(windows_of(packs, batch), POOL_SIZES)
                )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("column", PAPER)
def test_pools_are_as_unequal_as_the_paper_says(
    column: tuple[str, int], curves: dict[tuple[str, int], list[PoolCurve]]
) -> None:
    per_seed = curves[column]
    assert sum(map(len, per_seed)) >= 100
    before = np.concatenate([curve.before for curve in per_seed]).mean(axis=0)
    after = np.concatenate([curve.placed for curve in per_seed]).mean(axis=0)
    heaviest = np.concatenate([curve.heaviest for curve in per_seed])
    refined = np.concatenate([curve.refined for curve in per_seed])
    for i, size in enumerate(POOL_SIZES):
        paper_before, paper_after = PAPER[column][i]
        assert before[i] == pytest.approx(paper_before, rel=0.25)
        if size <= 4:
            assert after[i] == pytest.approx(paper_after, rel=0.2)
        else:
            assert after[i] <= 0.03
            assert refined[heaviest <= size, i].mean() <= 0.005


def test_real_lengths_come_near_the_paper_with_nothing_fitted() -> None:
    lengths = cut_to(np.load(MIX), 1 << 20)
    assert lengths.max() == 1 << 20
    curve = pool_curve(window_best_fit(lengths, 1 << 20, 32), POOL_SIZES)
    assert len(curve) == 38
    # what another implementation of this packing finds
    assert curve.before.mean(axis=0) == pytest.approx([2.056, 1.084, 0.531, 0.209], rel=0.15)
    assert curve.placed.mean(axis=0)[:2] == pytest.approx([1.147, 0.169], rel=0.15)
    assert curve.placed.mean(axis=0)[2:].max() < 0.01


def test_windows_packed_one_at_a_time_hold_whole_packs_of_whole_samples() -> None:
    lengths = np.array([5, 4, 3, 3, 2, 1, 1, 1, 6, 6, 2, 2])
    windows = [sorted(window.tolist()) for window in window_best_fit(lengths, 6, 2)]
    # the buffer holds 5, 4, 3 at first, then the 3 that is left and 3, 2, 1, 1, 1, 6
    assert windows[:2] == [[4 * 4, 5 * 5], [3 * 3 + 3 * 3, 6 * 6]]
    assert all(len(window) == 2 for window in windows)


def test_cutting_keeps_all_tokens_in_place() -> None:
    assert cut_to(np.array([3, 25, 10, 11], dtype=np.uint32), 10).tolist() == [
        3, 10, 10, 5, 10, 10, 1,
    ]  # fmt: skip
