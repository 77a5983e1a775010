"""The law of large numbers: the formula of the paper, and packs grouped at random."""

from __future__ import annotations

import math

import numpy as np
import pytest

import libra
from libra.simulate.pooling import expected_imbalance, pool_curve, random_grouping, variation


def test_the_formula_is_the_papers() -> None:
    expected = expected_imbalance(1.29, 128, [2, 8])
    assert expected[0] == pytest.approx(1.29 / math.sqrt(2) * math.sqrt(2 * math.log(64)))
    assert expected[1] == pytest.approx(1.29 / math.sqrt(8) * math.sqrt(2 * math.log(16)))


def test_arguments_broadcast_and_one_pool_is_balanced() -> None:
    table = expected_imbalance(1.0, np.array([[64], [128]]), [1, 64])
    assert table.shape == (2, 2)
    assert table[0, 1] == 0


@pytest.mark.parametrize("arguments", [(-1, 8, 2), (float("nan"), 8, 2), (1, 8, 16), (1, 8, 0)])
def test_what_no_grouping_has_is_refused(arguments: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match=r"variation|pool_size"):
        expected_imbalance(*arguments)


def test_random_pools_of_many_like_packs_follow_the_formula() -> None:
    workloads = np.random.default_rng(0).gamma(4.0, 1.0, 20_000)
    assert variation(workloads) == pytest.approx(0.5, rel=0.03)
    found = random_grouping(workloads, packs=1024, pool_sizes=[4, 16, 1024], draws=200)
    expected = expected_imbalance(variation(workloads), 1024, [4, 16, 1024])
    assert found[:2] == pytest.approx(expected[:2], rel=0.25)
    assert found[2] == pytest.approx(0, abs=1e-12)


def test_draws_agree_with_every_possible_grouping() -> None:
    workloads = [0.0, 1.0, 2.0, 5.0]
    # pools of two: 5 with 0, 1 or 2, alike likely, over a mean of 4
    exact = np.mean([5 / 4, 6 / 4, 7 / 4]) - 1
    found = random_grouping(workloads, packs=4, pool_sizes=[2], draws=4000, seed=5)
    error = np.std([5 / 4, 6 / 4, 7 / 4]) / np.sqrt(4000)
    assert abs(found[0] - exact) < 4 * error
    again = random_grouping(workloads, packs=4, pool_sizes=[2], draws=4000, seed=5)
    assert found.tolist() == again.tolist()


def test_windows_of_padding_are_balanced() -> None:
    assert random_grouping([0, 0], packs=2, pool_sizes=[1], draws=3).tolist() == [0.0]
    assert variation([0, 0]) == 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"packs": 9}, "8 packs, less than one window of 9"),
        ({"pool_sizes": [2, 3]}, "pool_size=3"),
        ({"pool_sizes": [0]}, "pool_size is 0"),
        ({"draws": 0}, "draws"),
        ({"workloads": [1.0, float("nan")]}, "finite"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"workloads": np.arange(8), "packs": 4, "pool_sizes": [2], **changes}
    with pytest.raises(ValueError, match=message):
        random_grouping(arguments.pop("workloads"), **arguments)  # type: ignore[arg-type]


def test_a_pool_curve_is_what_placement_and_refinement_say() -> None:
    windows = np.random.default_rng(0).integers(1, 1000, (5, 16))
    curve = pool_curve(windows, [2, 4])
    pools = libra.place_packs(windows[3], 4)
    loads = windows[3][pools].sum(axis=1)
    assert curve.placed[3, 1] == pytest.approx(loads.max() / loads.mean() - 1)
    assert (curve.refined <= curve.placed).all()
    assert curve.heaviest[3] == windows[3].max() / windows[3].mean()
    with pytest.raises(ValueError, match="pool_size=3"):
        pool_curve(windows, [3])
    with pytest.raises(ValueError, match="no window"):
        pool_curve([], [2])
