"""The report of a plan: figures of its placements, and JSON that every reader takes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from libra.cli.choose_pool import choose_pool
from libra.cli.plan_report import PlanReport, report_plan
from libra.config import HeadShape, PoolConfig
from libra.cost import CLUSTERS, AttentionTime, published_table


def report_of(*, q: int = 8, cp_size: int = 2, **settings: Any) -> PlanReport:
    """Of a pool of two packs: one sample of 1024 tokens, and four of 256."""
    cluster = CLUSTERS["h100"]
    return report_plan(
        choose_pool(np.array([1024, *[256] * 4]), tokens=1024, global_batch=2, pool_size=2),
        tokens=1024,
        cp_size=cp_size,
        config=PoolConfig(pool_size=2, chunks=1, block_size=256, **settings),
        heads=HeadShape(q=q, kv=q // 2, dim=8),
        attention=AttentionTime(cluster=cluster, table=published_table(cluster)),
    )


def test_bytes_of_placements_add_up_and_ulysses_computes_what_its_packs_do() -> None:
    report = report_of()
    traffic = report.plan.traffic
    placed, ulysses = report.placed, report.ulysses
    assert placed.forward.kinds.tolist() == traffic.sum(axis=(1, 2)).tolist()
    assert placed.forward.total == traffic.sum()
    assert placed.forward.sent == traffic.sum(axis=(0, 2)).max()
    assert placed.backward.received == report.plan.backward_traffic.sum(axis=(0, 1)).max()
    assert ulysses is not None and ulysses.load.sum() == placed.load.sum()
    assert report.bound_ratio == traffic.sum() / report.bound
    first, second = (each.forward.compute.max() for each in report.ulysses_lines)
    assert report.ulysses_compute("forward") == max(first, second)


def test_without_ulysses_there_is_its_reason_and_no_seconds() -> None:
    report = report_of(q=2, cp_size=4)
    assert report.ulysses is None and report.ulysses_compute("backward") is None
    assert report.ulysses_refused is not None and "divide by CP" in report.ulysses_refused
    found = json.loads(report.to_json())
    assert found["modelled"]["forward"]["ulysses_compute"] is None


@pytest.mark.parametrize("limit, shown", [(float("inf"), None), (0.5, 0.5)])
def test_the_json_has_null_for_a_setting_without_a_limit(limit: float, shown: float | None) -> None:
    found = json.loads(report_of(traffic_limit=limit).to_json())
    assert found["config"]["traffic_limit"] == shown
    assert found["placements"][0]["worst_backward_sent"] >= 0
    assert set(found["per_worker"]["extra_memory"]) == {"q", "kv", "o", "total"}
