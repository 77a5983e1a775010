"""Packing by cost and its sampler: every sample kept, packs of similar cost, no pack too large."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import libra
from libra.baselines.wlb import WlbConfig, WlbSampler, pack_by_cost
from libra.data.lengths import workloads

LENGTHS = np.random.default_rng(0).pareto(1.2, 400).astype(np.int64) * 20 + 1
PACKS = libra.pack_sequential(LENGTHS, 512, longer="drop")
BATCH, DP = 8, 4


def packed_lengths(
    lengths: list[int], packs: int, most: int, linear_tokens: float = 0.0
) -> list[list[int]]:
    config = WlbConfig(most_tokens=1.0, linear_tokens=linear_tokens)
    held = pack_by_cost(np.array(lengths), packs, most, config)
    return [np.array(lengths)[pack].tolist() for pack in held]


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    packs=st.integers(1, 8),
    linear=st.floats(0, 1e4),
)
def test_packing_by_cost_keeps_every_sample_and_the_limit(
    lengths: list[int], packs: int, linear: float
) -> None:
    most = max(1000, -(-2 * sum(lengths) // packs))
    packed = packed_lengths(lengths, packs, most, linear)
    assert len(packed) == packs
    assert sorted(length for pack in packed for length in pack) == sorted(lengths)
    assert max(map(sum, packed)) <= most


def test_packing_by_cost_puts_short_samples_where_no_long_one_is() -> None:
    assert packed_lengths([100, 10, 10, 10], 2, 100) == [[100], [10, 10, 10]]


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([11], "a sample has 11 tokens, more than most_tokens=10"),
        ([6, 6, 6], "2 packs of at most 10 tokens cannot take a sample of 6 more"),
    ],
)
def test_packing_by_cost_refuses_what_does_not_fit(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_by_cost(np.array(lengths), 2, 8, WlbConfig(most_tokens=1.25, linear_tokens=1.0))


def samplers(config: WlbConfig | None = None) -> list[WlbSampler]:
    return [
        WlbSampler(PACKS, global_batch=BATCH, dp_rank=rank, dp_size=DP, config=config, seed=3)
        for rank in range(DP)
    ]


def windows_of_fragments() -> list[list[int]]:
    """Fragments of every window in the order of `PoolSampler`, sorted."""
    plain = libra.PoolSampler(PACKS, global_batch=BATCH, dp_rank=0, dp_size=DP, pool_size=1, seed=3)
    order = plain.schedule().reshape(plain.windows, BATCH)
    spans = [[PACKS.pieces_of(pack) for pack in window] for window in order.tolist()]
    return [sorted(i for span in row for i in range(span.start, span.stop)) for row in spans]


@pytest.mark.filterwarnings("ignore:.*packs over")
def test_every_optimizer_step_trains_on_the_samples_of_plain_packing() -> None:
    every = [list(sampler) for sampler in samplers()]
    steps = BATCH // DP
    for number, wanted in enumerate(windows_of_fragments()):
        mine = [pack for packs in every for pack in packs[number * steps : (number + 1) * steps]]
        assert len(mine) == BATCH
        assert sorted(np.concatenate(mine).tolist()) == wanted
    assert {len(packs) for packs in every} == {len(samplers()[0])}


@pytest.mark.filterwarnings("ignore:.*packs over")
def test_packs_have_like_cost_and_at_most_the_tokens_allowed() -> None:
    config = WlbConfig(most_tokens=1.5)
    first = [next(iter(sampler)) for sampler in samplers(config)]
    costs = workloads(PACKS.lengths[pack] for pack in first).tolist()
    plain = [PACKS.workloads[pack] for pack in range(len(PACKS))]
    assert max(costs) / np.mean(costs) < max(plain) / np.mean(plain)
    for sampler, pack in zip(samplers(config), first, strict=True):
        bounds = sampler.cu_seqlens(pack)
        assert bounds.dtype == np.int32 and bounds[-1] <= 1.5 * 512
        assert (np.diff(bounds) == PACKS.lengths[pack]).all()


@pytest.mark.filterwarnings("ignore:.*packs over")
def test_an_epoch_can_be_chosen() -> None:
    sampler, other = samplers()[0], samplers()[0]
    other.set_epoch(1)
    assert [pack.tolist() for pack in sampler] != [pack.tolist() for pack in other]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"most_tokens": 0.5}, r"most_tokens is 0\.5; it must be >= 1"),
        ({"linear_tokens": -1.0}, r"linear_tokens is -1\.0; it must be >= 0"),
        ({"most_tokens": float("nan")}, "most_tokens is nan"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WlbConfig(**settings)
