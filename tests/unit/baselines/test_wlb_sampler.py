"""The samplers of the baselines: the same optimizer steps, other packs."""

from __future__ import annotations

import numpy as np
import pytest

import libra
from libra.baselines.cluster_pool import cluster_config, cluster_sampler
from libra.baselines.wlb import WlbConfig
from libra.baselines.wlb_sampler import WlbSampler
from libra.data.lengths import pack_workload

LENGTHS = np.random.default_rng(0).pareto(1.2, 400).astype(np.int64) * 20 + 1
PACKS = libra.pack_sequential(LENGTHS, 512, longer="drop")
BATCH, DP = 8, 4


def samplers(config: WlbConfig | None = None) -> list[WlbSampler]:
    return [
        WlbSampler(PACKS, global_batch=BATCH, dp_rank=rank, dp_size=DP, config=config, seed=3)
        for rank in range(DP)
    ]


def windows_of_fragments() -> list[list[int]]:
    """Fragments of every window in the order of `PoolSampler`, sorted."""
    plain = libra.PoolSampler(PACKS, global_batch=BATCH, dp_rank=0, dp_size=DP, pool_size=1, seed=3)
    order = plain.schedule().reshape(plain.windows, BATCH)
    spans = [[PACKS.fragments_of(pack) for pack in window] for window in order.tolist()]
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
    costs = [pack_workload(PACKS.lengths[pack]) for pack in first]
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


@pytest.mark.filterwarnings("ignore:.*packs over")
def test_a_cluster_wide_pool_takes_packs_in_plain_order() -> None:
    config = cluster_config(libra.PoolConfig(pool_size=2, chunks=2), DP)
    assert (config.pool_size, config.chunks) == (DP, 2)
    sampler = cluster_sampler(
        PACKS, global_batch=BATCH, dp_rank=1, dp_size=DP, shuffle=False, seed=3
    )
    steps = len(sampler)
    assert (sampler.schedule() == np.arange(steps * DP).reshape(steps, DP)).all()
