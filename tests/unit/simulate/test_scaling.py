"""Throughput against the number of replicas."""

from __future__ import annotations

from libra.simulate.predict import ulysses_seconds
from libra.simulate.results import ScalePoint
from libra.simulate.scaling import fixed_batch, weak
from tests.unit.simulate.small_cluster import SETTING, first_window, window


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
