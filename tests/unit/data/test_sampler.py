"""The sampler: every optimizer step holds the same packs, however they are placed."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.data.refinement import order_pools, refine_pools
from libra.data.sampler import PoolSampler
from libra.data.vrsp import imbalance, place_packs, pool_loads
from tests.unit.data.samplers import GBS, PLAIN, corpus, make, ranks, whole_windows, windows_of

# What an optimizer step holds


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_optimizer_step_has_the_same_raw_samples_with_and_without_vrsp(shuffle: bool) -> None:
    packs = corpus()
    fragments = list(zip(packs.samples.tolist(), packs.starts.tolist(), strict=True))

    def raw_samples(sampler: PoolSampler, epoch: int) -> list[Counter[tuple[int, int]]]:
        steps = sampler.schedule(epoch).reshape(-1, GBS)
        return [
            Counter(f for pack in step.tolist() for f in fragments[packs.fragments_of(pack)])
            for step in steps
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, vrsp = (
            make(lengths_of_packs=packs, placement=placement, shuffle=shuffle)
            for placement in ("contiguous", "vrsp")
        )
        paper = make(lengths_of_packs=packs, shuffle=shuffle, **PLAIN)
    for epoch in (0, 3):
        assert raw_samples(plain, epoch) == raw_samples(vrsp, epoch) == raw_samples(paper, epoch)
        assert plain.schedule(epoch).tolist() != vrsp.schedule(epoch).tolist()


@given(
    shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (16, 1), (16, 16)]),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    refine=st.booleans(),
    order=st.sampled_from(["grouped", "uniform", "index"]),
)
def test_a_window_holds_the_same_packs_for_any_number_of_replicas_and_pool_size(
    shape: tuple[int, int], seed: int, epoch: int, shuffle: bool, refine: bool, order: str
) -> None:
    dp_size, pool_size = shape
    common = {"seed": seed, "shuffle": shuffle}
    sampler = make(dp_size=dp_size, pool_size=pool_size, refine=refine, order=order, **common)
    plain = make(dp_size=1, pool_size=1, placement="contiguous", **common)
    assert windows_of(sampler.schedule(epoch)) == windows_of(plain.schedule(epoch))


def test_without_shuffle_the_windows_are_in_file_order() -> None:
    expected = np.arange(6 * GBS).reshape(6, GBS).tolist()
    assert windows_of(make(shuffle=False).schedule()) == expected


def test_an_epoch_visits_every_pack_once_and_another_in_another_order() -> None:
    first, second = make().schedule(0), make().schedule(1)
    assert sorted(first.ravel().tolist()) == sorted(second.ravel().tolist()) == list(range(6 * GBS))
    assert windows_of(first) != windows_of(second)


def test_the_order_is_pinned_so_that_a_checkpoint_outlives_upgrades() -> None:
    sampler = make(lengths_of_packs=[[1]] * 8, global_batch=8, dp_size=1, pool_size=1, seed=3)
    assert sampler.schedule(0).ravel().tolist() == [4, 6, 1, 5, 7, 0, 3, 2]
    assert sampler.schedule(1).ravel().tolist() == [0, 6, 7, 5, 2, 1, 4, 3]


# The order inside a step


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("order", ["index", "grouped", "uniform"])
def test_pools_are_emitted_ga_major_and_pool_minor(refine: bool, order: Any) -> None:
    sampler = make(dp_size=8, pool_size=2, shuffle=False, refine=refine, order=order)
    schedule = sampler.schedule()
    assert schedule.shape == (6 * 2, 8)
    assert schedule.dtype == np.int64
    workloads = np.array([int((pack**2).sum()) for pack in whole_windows()])
    for window in range(6):
        weights = workloads[window * GBS : (window + 1) * GBS]
        pools = place_packs(weights, 2)
        if refine:
            pools = refine_pools(weights, pools)
        pools = order_pools(weights, pools, 4, order) + window * GBS
        for k, pool in enumerate(pools):
            step, p = window * 2 + k // 4, k % 4
            assert schedule[step, p * 2 : p * 2 + 2].tolist() == pool.tolist()


def test_each_rank_yields_its_column_of_the_schedule() -> None:
    for rank, sampler in enumerate(ranks()):
        assert list(sampler) == sampler.schedule(0)[:, rank].tolist()
        assert len(sampler) == 6 * GBS // 4


def test_the_pool_schedule_is_that_of_the_pool_that_a_rank_belongs_to() -> None:
    first, second, third, fourth = (s.pool_schedule().tolist() for s in ranks())
    whole = make().schedule()
    assert first == second == whole[:, :2].tolist()
    assert third == fourth == whole[:, 2:].tolist()


def test_vrsp_lowers_the_imbalance_between_pools() -> None:
    workloads = np.array([int((pack**2).sum()) for pack in whole_windows()])

    def mean_imbalance(placement: str) -> float:
        pools = make(placement=placement).schedule().reshape(6, -1, 2)
        return float(np.mean([imbalance(pool_loads(workloads, window)) for window in pools]))

    assert mean_imbalance("vrsp") < 0.7 * mean_imbalance("contiguous")


def test_refinement_and_grouping_lower_the_sum_over_steps_of_the_slowest_pool() -> None:
    packs = corpus(samples=4000)
    workloads = packs.workloads

    def slowest_pools(**settings: Any) -> int:
        sampler = make(lengths_of_packs=packs, global_batch=64, dp_size=16, pool_size=4, **settings)
        steps = sampler.schedule()
        loads = workloads[steps].reshape(len(steps), 4, 4).sum(axis=2)
        return int(loads.max(axis=1).sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, paper = slowest_pools(), slowest_pools(**PLAIN)
        assert ours < slowest_pools(refine=False) < paper
        assert ours < slowest_pools(order="uniform")
        assert paper < slowest_pools(placement="contiguous")


def test_the_default_is_refined_and_grouped_and_the_baseline_is_neither() -> None:
    sampler = make()
    assert (sampler.placement, sampler.refine, sampler.order) == ("vrsp", True, "grouped")
    baseline = make(placement="contiguous")
    assert (baseline.refine, baseline.order) == (False, "index")
    untouched = make(placement="contiguous", refine=False, order="uniform")
    assert baseline.schedule().tolist() == untouched.schedule().tolist()


# Epochs


def test_set_epoch_chooses_the_order() -> None:
    sampler = make()
    sampler.set_epoch(5)
    assert sampler.epoch == 5
    assert sampler.schedule().tolist() == make().schedule(5).tolist()
    assert list(sampler) == make().schedule(5)[:, 0].tolist()


def test_a_whole_pass_moves_on_to_the_next_epoch_and_a_broken_one_starts_again() -> None:
    sampler = make()
    epochs = [make().schedule(epoch)[:, 0].tolist() for epoch in range(3)]
    assert list(sampler) == epochs[0]
    walk = iter(sampler)
    assert [next(walk) for _ in range(5)] == epochs[1][:5]
    assert list(sampler) == epochs[1]
    sampler.set_epoch(2)
    assert list(sampler) == epochs[2]


# An incomplete last window


def test_an_incomplete_last_window_is_dropped_and_says_so() -> None:
    packs = list(corpus())[: 2 * GBS + 5]
    with pytest.warns(
        UserWarning, match="37 packs are 2 windows of global_batch=16 and 5 packs"
    ) as w:
        sampler = PoolSampler(packs, global_batch=GBS, dp_rank=0, dp_size=4, pool_size=2)
    assert len(w) == 1
    assert w[0].filename == __file__  # points at the user's line
    assert (sampler.windows, sampler.dropped_packs, sampler.repeated_packs) == (2, 5, 0)
    assert len(set(sampler.schedule().ravel().tolist())) == 2 * GBS


def test_an_incomplete_last_window_is_filled_up_from_the_start_of_the_epoch_by_choice() -> None:
    packs = list(corpus())[: 2 * GBS + 5]
    with pytest.warns(UserWarning, match="filled up with 11 packs of the epoch's start"):
        sampler = make(lengths_of_packs=packs, drop_last=False, shuffle=False)
    assert (sampler.windows, sampler.dropped_packs, sampler.repeated_packs) == (3, 0, 11)
    assert windows_of(sampler.schedule())[2] == [*range(11), *range(32, 37)]
    assert len(list(sampler)) == len(sampler) == 3 * GBS // 4


def test_whole_windows_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = make()
    assert (sampler.windows, sampler.dropped_packs, sampler.repeated_packs) == (6, 0, 0)


# Bad input


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lengths_of_packs": []}, "corpus is empty"),
        ({"lengths_of_packs": whole_windows(1)[:10]}, "10 packs, less than one global_batch=16"),
        ({"lengths_of_packs": [[4, 0]] * 16}, r"pack 0\[1\] is 0"),
        ({"dp_size": 3}, "global_batch=16 packs over dp_size=3 replicas"),
        ({"pool_size": 3}, "pool_size=3 does not divide dp_size=4"),
        ({"pool_size": 8}, "pool_size=8 does not divide dp_size=4"),
        ({"dp_rank": 4}, r"dp_rank=4 is outside \[0, dp_size=4\)"),
        ({"dp_rank": -1}, "dp_rank is -1"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 16.0}, "global_batch is 16.0"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"pool_size": True}, "pool_size is True"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": None}, "seed is None"),
        ({"placement": "best"}, "placement is 'best'"),
        ({"order": "best"}, "order is 'best'"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize("epoch", [-1, 1.5, None])
def test_an_epoch_that_is_no_count_is_refused(epoch: object) -> None:
    with pytest.raises(ValueError, match="epoch is"):
        make().set_epoch(epoch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch is -1"):
        make().schedule(-1)
