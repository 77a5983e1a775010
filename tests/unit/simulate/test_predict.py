"""Schemes on one small window: who waits for what, in closed form where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.cost import Parallelism
from libra.data.packing import Packs
from libra.simulate.predict import Setting, WindowSeconds, scheme_seconds
from libra.simulate.schemes import PREDICTED
from tests.unit.simulate.small_cluster import (
    BATCH,
    CP,
    MODEL,
    SETTING,
    TOKENS,
    first_window,
    window,
)


def figures(scheme: str, setting: Setting = SETTING) -> WindowSeconds:
    found = scheme_seconds(first_window(), setting, scheme)
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
    for scheme in PREDICTED:
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
    assert scheme_seconds(first_window(), setting, "cluster") is None


@pytest.mark.parametrize(
    "scheme, packs, message",
    [
        ("ulises", first_window(), "scheme is 'ulises'; choose one of 'ulysses', 'wlb'"),
        ("libra", window(), "a window of .* packs for global_batch=8"),
    ],
)
def test_what_does_not_fit_is_refused(scheme: str, packs: Packs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheme_seconds(packs, SETTING, scheme)


@pytest.mark.parametrize("scheme", ["ulysses", "wlb", "libra"])
def test_packs_of_padding_take_no_time(scheme: str) -> None:
    one = np.array([0, *[1] * BATCH])  # a sample in the first pack, none in the others
    packs = Packs(
        tokens=TOKENS, lengths=np.array([100]), offsets=one, samples=one[:1], starts=one[:1]
    )
    found = scheme_seconds(packs, SETTING, scheme)
    assert found is not None
    assert (found.forward > 0).sum() == (found.backward > 0).sum() == 1
