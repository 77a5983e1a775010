"""The samples that each scheme runs at every step of a window."""

from __future__ import annotations

import numpy as np
import pytest

import libra
from libra.baselines.wlb import WlbConfig
from libra.bench.runner import Step, window_steps
from libra.simulate.schemes import MEASURED, SCHEMES

LENGTHS = [64, 8, 8, 8, 8, 8, 8, 8, 8, 32, 32, 64, 16, 16, 16, 16]
WINDOW = libra.pack_sequential(LENGTHS, 64)  # five packs: 64^2, 8 * 8^2, 2 * 32^2, 64^2, 4 * 16^2
DP, CONFIG = 2, libra.PoolConfig(pool_size=2, chunks=2, shard_layout="zigzag")


def window(packs: int) -> libra.Packs:
    return libra.pack_sequential([64, *[8] * 8, 32, 32, *[16] * 4] * packs, 64)


def steps(packs: libra.Packs, key: str, dp: int = DP) -> list[Step]:
    scheme = SCHEMES[key]
    size = scheme.pool_config(CONFIG, dp).pool_size
    return window_steps(packs, scheme, dp_size=dp, pool_size=size, wlb=WlbConfig())


@pytest.mark.parametrize("scheme", MEASURED)
def test_a_window_keeps_its_samples(scheme: str) -> None:
    packs = window(2)
    found = steps(packs, scheme)
    assert len(found) == len(packs) // DP
    held = np.concatenate([f for step in found for f in step.fragments])
    assert sorted(held.tolist()) == list(range(len(packs.lengths)))
    for step in found:
        for replica in range(DP):
            bounds = step.cu_seqlens(packs, replica)
            assert bounds[-1] <= step.tokens[replica]


@pytest.mark.parametrize("scheme", ["ulysses", "ring", "cluster", "tap"])
def test_baselines_and_tap_take_packs_in_sampler_order(scheme: str) -> None:
    packs = window(2)
    for number, step in enumerate(steps(packs, scheme)):
        for replica in range(DP):
            span = packs.pieces_of(number * DP + replica)
            assert step.fragments[replica].tolist() == list(range(span.start, span.stop))
            assert step.tokens[replica] == 64


def test_vrsp_deals_pools_of_like_load() -> None:
    packs = libra.pack_sequential([64, 64, *[8] * 16], 64)  # two heavy packs, then two light ones
    spread = {
        scheme: [
            sum(int((packs.lengths[f] ** 2).sum()) for f in step.fragments)
            for step in steps(packs, scheme)
        ]
        for scheme in ("tap", "tap_vrsp", "libra")
    }
    assert spread["tap"] == [2 * 64**2, 16 * 8**2]
    assert spread["tap_vrsp"] == spread["libra"] == [64**2 + 8 * 8**2] * 2


def test_wlb_packs_have_their_own_tokens() -> None:
    packs = libra.pack_sequential([64, 32, 32, *[8] * 16], 64)
    found = steps(packs, "wlb")
    assert [token for step in found for token in step.tokens] != [64] * 4
    assert sum(token for step in found for token in step.tokens) == 4 * 64


@pytest.mark.parametrize(
    "scheme, pool_size, chunks, placement",
    [
        ("ulysses", 1, 1, "ulysses"),
        ("wlb", 1, 1, "ulysses"),
        ("cluster", 8, 2, "surplus"),
        ("tap", 2, 1, "surplus"),
        ("tap_vrsp", 2, 1, "surplus"),
        ("libra", 2, 2, "surplus"),
    ],
)
def test_schemes_are_configurations(
    scheme: str, pool_size: int, chunks: int, placement: str
) -> None:
    found = SCHEMES[scheme].pool_config(CONFIG, 8)
    assert (found.pool_size, found.chunks, found.placement) == (pool_size, chunks, placement)
    assert found.shard_layout == "zigzag"


def test_a_pool_larger_than_the_job_shrinks_to_it() -> None:
    assert SCHEMES["libra"].pool_config(libra.PoolConfig(pool_size=8), 2).pool_size == 2


def test_replicas_must_divide_a_window() -> None:
    with pytest.raises(ValueError, match="global_batch=5 packs over 2 replicas"):
        steps(WINDOW, "ulysses")
