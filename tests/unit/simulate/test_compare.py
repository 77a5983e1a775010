"""The comparison of schemes: parts of a step, loads of a pool, times and schedules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.simulate.compare import (
    compare_schemes,
    fixed_batch,
    microbatch_times,
    pipeline_results,
    scheme_results,
    weak,
    worker_loads,
)
from libra.simulate.predict import WindowSeconds, scheme_seconds, ulysses_seconds
from libra.simulate.results import ScalePoint
from libra.simulate.schemes import PREDICTED
from tests.unit.simulate.small_cluster import BATCH, CP, SETTING, first_window, window

WINDOWS = [first_window(0), first_window(1)]


@pytest.fixture(scope="module")
def schemes() -> dict[str, list[WindowSeconds]]:
    known = [scheme_seconds(window, SETTING, "libra") for window in WINDOWS]
    libra = [each for each in known if each is not None]
    ticks: list[tuple[int, int | None]] = []
    found = compare_schemes(
        WINDOWS, libra, SETTING, lambda stage, done, total: ticks.append((done, total))
    )
    assert ticks[-1] == (14, 14) and found["libra"] == libra
    return found


def test_every_scheme_is_compared_and_its_parts_make_its_step(
    schemes: dict[str, list[WindowSeconds]],
) -> None:
    results = scheme_results(schemes, SETTING)
    assert tuple(each.key for each in results) == PREDICTED
    assert results[0].speedup == 1
    for each in results:
        parts = each.attention_seconds + each.exposed_seconds + each.other_seconds
        assert parts == pytest.approx(each.step_seconds)
        assert each.worst_index >= each.mean_index > 0
        assert each.speedup == results[0].step_seconds / each.step_seconds


def test_a_plan_makes_the_workers_of_a_pool_more_equal() -> None:
    loads = worker_loads(WINDOWS[0], SETTING)
    assert len(loads.before) == len(loads.after) == SETTING.config.pool_size * CP
    assert np.mean(loads.before) == pytest.approx(1) == np.mean(loads.after)
    assert max(loads.after) <= max(loads.before)


def test_every_microbatch_is_in_a_bin(schemes: dict[str, list[WindowSeconds]]) -> None:
    times = microbatch_times(schemes, SETTING)
    assert set(times.counts) == {"ulysses", "libra"}
    for counts in times.counts.values():
        assert sum(counts) == len(WINDOWS) * BATCH and len(counts) == len(times.edges) - 1


def test_schedules_that_do_not_divide_are_left_out(
    schemes: dict[str, list[WindowSeconds]],
) -> None:
    found = {(each.schedule, each.stages) for each in pipeline_results(schemes, SETTING)}
    # Four layers: eight stages, and four stages of two chunks, do not divide them.
    assert found == {("gpipe", 2), ("gpipe", 4), ("1f1b", 2), ("1f1b", 4), ("interleaved", 2)}
    staged = replace(SETTING, parallelism=replace(SETTING.parallelism, pp=4))
    assert {each.stages for each in pipeline_results(schemes, staged)} == {4}


def test_with_more_replicas_ulysses_falls_behind_libra() -> None:
    points = list(fixed_batch(first_window(), {}, SETTING, most=1024))
    assert [point.dp for point in points] == [1, 2, 4, 8]
    assert [point.gpus for point in points] == [2, 4, 8, 16]
    efficiency = [point.efficiency for point in points]
    assert efficiency[-1]["libra"] > efficiency[-1]["ulysses"]
    assert efficiency[0]["ulysses"] > efficiency[-1]["ulysses"]


def grown() -> list[ScalePoint]:
    alone = ulysses_seconds(window(), SETTING)
    return list(weak(window(), alone, SETTING, most=16, seed=1))


def test_weak_scaling_grows_the_batch_with_the_replicas() -> None:
    points = grown()
    assert [point.dp for point in points] == [1, 2, 4, 8, 16]
    rates = [point.tokens_per_second for point in points]
    assert all(rate["ideal"] >= rate["libra"] >= 0 for rate in rates)
    ideal = [rate["ideal"] for rate in rates]
    assert ideal == sorted(ideal)
    assert points == grown()
