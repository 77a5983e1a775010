"""From step times to results: means, slowest steps, and ratios to Ulysses."""

from __future__ import annotations

import pytest

from libra.bench.results import StepTimes, compare


def step(window: int, straggler: float, load: int, wait: float = 0.0) -> StepTimes:
    return StepTimes(
        window=window,
        step=0,
        straggler=straggler,
        compute=straggler - wait - 0.25,
        exposed=0.25,
        wait=wait,
        cpu=straggler / 4,
        load=load,
        sent=2_000_000,
    )


ULYSSES = [step(0, 4.0, 40, wait=1.0), step(0, 2.0, 20), step(1, 6.0, 60, wait=3.0), step(1, 4, 40)]
LIBRA = [step(0, 2.0, 20), step(0, 2.0, 20), step(1, 2.0, 20), step(1, 2.0, 20)]
TIMES = {"ulysses": ULYSSES, "libra": LIBRA}


def test_means_are_over_all_steps_and_maxima_over_a_windows_steps() -> None:
    found = compare(TIMES)["ulysses"]
    for means in (found.mean, found.slowest):
        assert means.straggler == pytest.approx(means.compute + means.exposed + means.wait)
    assert found.mean.straggler == pytest.approx(4.0)
    assert found.slowest.straggler == pytest.approx((4.0 + 6.0) / 2)
    assert found.mean.wait == pytest.approx(1.0)
    assert found.slowest.wait == pytest.approx(2.0)
    assert found.mean.sent == pytest.approx(2_000_000)


def test_everything_is_normalised_to_ulysses() -> None:
    found = compare(TIMES)
    base, libra = found["ulysses"].of_ulysses, found["libra"].of_ulysses
    assert base is not None and base.straggler == base.slowest == 1
    assert libra is not None
    assert libra.straggler == pytest.approx(0.5)
    assert libra.slowest == pytest.approx(0.4)
    assert libra.exposed == pytest.approx(0.25 / 4)
    assert libra.speedup == pytest.approx(2.0)
    assert libra.slowest_speedup == pytest.approx(2.5)
    assert libra.cpu_speedup == pytest.approx(2.0)
    assert libra.predicted == pytest.approx(40 / 20)


def test_without_ulysses_there_are_seconds_only() -> None:
    assert compare({"libra": LIBRA})["libra"].of_ulysses is None
