"""Schemes on one small window: who waits for what, in closed form where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import libra
from libra.cost import CLUSTERS, Model, Parallelism, published_table
from libra.cost.attention_time import AttentionTime
from libra.data.packing import Packs
from libra.simulate.scaling import fixed_batch, select_packs, weak
from libra.simulate.schemes import SCHEMES, SchemeFigures, Setting, scheme_figures
from libra.simulate.wlb import pack_by_cost

TOKENS, BATCH, DP, CP = 16_384, 8, 4, 2
MODEL = Model(
    name="small", layers=4, hidden=1024, q_heads=8, kv_heads=8, head_dim=128, ffn=2048, vocab=1000
)
CLUSTER = CLUSTERS["h100"]
SETTING = Setting(
    model=MODEL,
    parallelism=Parallelism(dp=DP, cp=CP, global_batch=BATCH, tokens=TOKENS),
    time=AttentionTime(cluster=CLUSTER, table=published_table(CLUSTER)),
    config=libra.PoolConfig(pool_size=2, block_size=1024),
)


def window(seed: int = 0) -> Packs:
    """Eight packs, one of them a single long sample."""
    source = np.random.default_rng(seed)
    short = source.integers(64, 512, size=2000)
    return libra.pack_sequential(np.insert(short, 0, TOKENS)[:2000], TOKENS)


def first_window(seed: int = 0) -> Packs:
    return select_packs(window(seed), np.arange(BATCH))


def figures(scheme: str, setting: Setting = SETTING) -> SchemeFigures:
    found = scheme_figures(first_window(), setting, scheme)
    assert found is not None
    return found


def test_a_long_sample_takes_ulysses_what_the_kernel_table_says() -> None:
    table = SETTING.time.table
    wanted = sum(
        float(table.seconds(TOKENS, TOKENS, MODEL.q_heads // CP, direction=direction))
        for direction in ("forward", "backward")
    )
    # Rows of its own and fetched ones are two launches a pass.
    assert figures("ulysses").compute[0] == pytest.approx(wanted + 4 * table.call_seconds, rel=0.03)


def test_the_ideal_spreads_the_work_of_ulysses() -> None:
    ideal, ulysses = figures("ideal"), figures("ulysses")
    assert ideal.compute.sum() == pytest.approx(ulysses.compute.sum())
    assert np.ptp(ideal.forward) == 0
    assert (ideal.forward + ideal.backward) == pytest.approx(ideal.compute)


def test_no_scheme_is_faster_than_the_ideal() -> None:
    ideal = figures("ideal").step(SETTING).seconds
    for scheme in SCHEMES:
        assert figures(scheme).step(SETTING).seconds >= ideal * 0.999


def test_the_pipeliner_never_costs_time() -> None:
    """TAP + VRSP with overlap is Libra but for the order of pools."""
    waiting, overlapping = figures("tap_vrsp"), figures("libra")
    assert np.sort(overlapping.forward).max() <= np.sort(waiting.forward).max() * 1.001


def test_each_step_of_libra_brings_the_slowest_pool_down() -> None:
    slowest = [
        float((found.forward + found.backward).max())
        for found in map(figures, ("ulysses", "tap", "tap_vrsp", "libra"))
    ]
    assert slowest == sorted(slowest, reverse=True)


def test_a_pool_of_more_than_1024_workers_is_not_planned() -> None:
    spread = Parallelism(dp=8, cp=256, global_batch=8, tokens=TOKENS)
    heads = replace(MODEL, q_heads=256, kv_heads=256)
    setting = replace(SETTING, parallelism=spread, model=heads)
    assert scheme_figures(first_window(), setting, "cluster") is None


@pytest.mark.parametrize(
    "scheme, packs, message",
    [
        ("ulises", first_window(), "scheme is 'ulises'; choose one of ulysses, wlb"),
        ("libra", window(), "a window of .* packs for global_batch=8"),
    ],
)
def test_what_does_not_fit_is_refused(scheme: str, packs: Packs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheme_figures(packs, SETTING, scheme)


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    packs=st.integers(1, 8),
    linear=st.floats(0, 1e4),
)
def test_packing_by_cost_keeps_every_sample_and_the_limit(
    lengths: list[int], packs: int, linear: float
) -> None:
    most = max(1000, -(-2 * sum(lengths) // packs))
    packed = pack_by_cost(np.array(lengths), packs, most, linear_tokens=linear)
    assert len(packed) == packs
    assert sorted(np.concatenate(packed).tolist()) == sorted(lengths)
    assert max(int(pack.sum()) for pack in packed) <= most


def test_packing_by_cost_puts_short_samples_where_no_long_one_is() -> None:
    packed = pack_by_cost(np.array([100, 10, 10, 10]), 2, 100, linear_tokens=0)
    assert [pack.tolist() for pack in packed] == [[100], [10, 10, 10]]


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([11], "a sample has 11 tokens, more than most_tokens=10"),
        ([6, 6, 6], "2 packs of at most 10 tokens cannot take a sample of 6 more"),
    ],
)
def test_packing_by_cost_refuses_what_does_not_fit(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_by_cost(np.array(lengths), 2, 10, linear_tokens=1.0)


def test_with_more_replicas_ulysses_falls_behind_libra() -> None:
    points = fixed_batch(first_window(), SETTING, schemes=("ulysses", "libra", "ideal"))
    assert [point.dp for point in points] == [1, 2, 4, 8]
    assert [point.gpus for point in points] == [2, 4, 8, 16]
    efficiency = [point.as_dict()["efficiency"] for point in points]
    assert efficiency[-1]["libra"] > efficiency[-1]["ulysses"]
    assert efficiency[0]["ulysses"] > efficiency[-1]["ulysses"]


def test_weak_scaling_grows_the_batch_with_the_replicas() -> None:
    points = weak(window(), SETTING, most=16, seed=1)
    assert [point.dp for point in points] == [1, 2, 4, 8, 16]
    rates = [point.tokens_per_second for point in points]
    assert all(rate["ideal"] >= rate["libra"] >= 0 for rate in rates)
    ideal = [rate["ideal"] for rate in rates]
    assert ideal == sorted(ideal)
    assert points == weak(window(), SETTING, most=16, seed=1)
