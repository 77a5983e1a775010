"""From step times to figures: means, slowest steps, and ratios to Ulysses."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from libra.bench.figures import compare, print_figures
from libra.bench.measure import StepTimes


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
    assert found["mean_seconds"] == pytest.approx(4.0)
    assert found["max_seconds"] == pytest.approx((4.0 + 6.0) / 2)
    assert sum(found["parts"].values()) == pytest.approx(found["mean_seconds"])
    assert sum(found["max_parts"].values()) == pytest.approx(found["max_seconds"])
    assert found["parts"]["wait"] == pytest.approx(1.0)
    assert found["max_parts"]["wait"] == pytest.approx(2.0)
    assert found["megabytes"] == pytest.approx(2.0)


def test_everything_is_normalised_to_ulysses() -> None:
    found = compare(TIMES)
    assert found["ulysses"]["of_ulysses"]["mean"] == found["ulysses"]["of_ulysses"]["max"] == 1
    libra = found["libra"]
    assert libra["of_ulysses"]["mean"] == pytest.approx(0.5)
    assert libra["of_ulysses"]["max"] == pytest.approx(0.4)
    assert libra["of_ulysses"]["exposed"] == pytest.approx(0.25 / 4)
    assert libra["speedup"] == pytest.approx(2.0)
    assert libra["max_speedup"] == pytest.approx(2.5)
    assert libra["cpu_speedup"] == pytest.approx(2.0)
    assert libra["predicted"] == pytest.approx(40 / 20)


def test_without_ulysses_there_are_seconds_only() -> None:
    found = compare({"libra": LIBRA})["libra"]
    assert "of_ulysses" not in found and "speedup" not in found


@pytest.mark.parametrize("times", [TIMES, {"libra": LIBRA}])
def test_the_table_names_schemes_and_says_that_tap_does_not_overlap(times) -> None:
    settings = {"tokens": 8192, "global_batch": 8, "windows": 2, "cp": 1}
    settings |= {"heads": 4, "kv_heads": 2, "head_dim": 64}
    found = {"machine": "a CPU", "dp": 2, "settings": settings, "schemes": compare(times)}
    text = StringIO()
    print_figures(found, Console(file=text, width=140))
    assert "Libra" in text.getvalue()
    assert "without overlap: chunks=1" in text.getvalue()
    assert ("2.00x" in text.getvalue()) == ("ulysses" in times)
