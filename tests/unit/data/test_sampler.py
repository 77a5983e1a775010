"""The sampler: every optimizer step holds the same packs, and a run resumes exactly anywhere."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from libra.data.packing import Packs, pack_sequential
from libra.data.pools import imbalance, make_pools, pool_loads
from libra.data.sampler import PoolSampler

GBS = 16
PLAIN: dict[str, Any] = {"refine": False, "order": "index"}  # the paper's VRSP and no more


def corpus(samples: int = 500, seed: int = 0) -> Packs:
    """96 or so packs with a few heavy ones."""
    lengths = np.random.default_rng(seed).lognormal(5, 1.3, samples).astype(np.int64) + 1
    return pack_sequential(lengths, 1024, longer="cut")


def whole_windows(windows: int = 6) -> list[np.ndarray]:
    """Packs that fill windows exactly."""
    return list(corpus())[: windows * GBS]


def make(**changes: Any) -> PoolSampler:
    """A sampler of six whole windows, DP 4, P 2, rank 0 but for the changes."""
    settings: dict[str, Any] = {
        "lengths_of_packs": whole_windows(),
        "global_batch": GBS,
        "dp_rank": 0,
        "dp_size": 4,
        "pool_size": 2,
        "seed": 7,
    }
    settings.update(changes)
    return PoolSampler(settings.pop("lengths_of_packs"), **settings)


def ranks(**changes: Any) -> list[PoolSampler]:
    return [make(dp_rank=rank, **changes) for rank in range(changes.get("dp_size", 4))]


def windows_of(schedule: np.ndarray) -> list[list[int]]:
    """Sorted packs of each optimizer step of a schedule [steps, dp_size]."""
    return np.sort(schedule.reshape(-1, GBS), axis=1).tolist()


# What an optimizer step holds


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_optimizer_step_has_the_same_raw_samples_with_and_without_vrsp(shuffle: bool) -> None:
    packs = corpus()
    pieces = list(zip(packs.samples.tolist(), packs.starts.tolist(), strict=True))

    def raw_samples(sampler: PoolSampler, epoch: int) -> list[Counter[tuple[int, int]]]:
        steps = sampler.schedule(epoch).reshape(-1, GBS)
        return [
            Counter(f for pack in step.tolist() for f in pieces[packs.pieces_of(pack)])
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
        pools = make_pools(weights, 2, 4, refine=refine, order=order) + window * GBS
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


# Resuming


def take(sampler: PoolSampler, count: int) -> list[int]:
    walk = iter(sampler)
    return [next(walk) for _ in range(count)]


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 3, 4, 11, 23, 24])
def test_a_run_resumes_at_any_step_of_any_epoch(epoch: int, done: int) -> None:
    for rank in range(4):
        before = make(dp_rank=rank)
        before.set_epoch(epoch)
        seen = take(before, done)
        after = make(dp_rank=rank)
        after.load_state_dict(before.state_dict())
        assert after.epoch == epoch
        assert seen + list(after) == make().schedule(epoch)[:, rank].tolist()
        assert list(after) == make().schedule(epoch + 1)[:, rank].tolist()


def test_after_a_whole_pass_a_run_resumes_at_the_next_epoch() -> None:
    before = make()
    list(before)
    after = make()
    after.load_state_dict(before.state_dict())
    after.set_epoch(1)
    assert list(after) == make().schedule(1)[:, 0].tolist()


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_and_drops_it_for_another() -> None:
    before = make()
    before.set_epoch(3)
    take(before, 5)
    after = make()
    after.load_state_dict(before.state_dict())
    after.set_epoch(3)
    assert take(after, 1) == make().schedule(3)[5:6, 0].tolist()
    after.load_state_dict(before.state_dict())
    after.set_epoch(4)
    assert list(after) == make().schedule(4)[:, 0].tolist()


def test_iterators_that_are_thrown_away_use_up_no_position() -> None:
    before = make()
    take(before, 5)
    after = make()
    after.load_state_dict(before.state_dict())
    iter(after)
    assert after.state_dict() == before.state_dict()
    assert take(after, 2) == make().schedule(0)[5:7, 0].tolist()
    assert take(after, 2) == make().schedule(0)[:2, 0].tolist()


def test_the_state_is_plain_and_the_same_on_every_rank() -> None:
    states = []
    for sampler in ranks():
        take(sampler, 9)
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    assert all(type(value) in (int, str, bool) for value in states[0].values())


@pytest.mark.parametrize("new_dp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("done", [4, 6, 8, 23])
@pytest.mark.parametrize("settings", [{}, PLAIN], ids=["grouped", "plain"])
def test_another_number_of_replicas_resumes_with_every_step_unchanged(
    new_dp: int, done: int, settings: dict[str, Any]
) -> None:
    old = make(dp_size=4, pool_size=1, **settings)
    take(old, done)
    schedule = make(dp_size=4, pool_size=1, **settings).schedule()
    resumed = ranks(dp_size=new_dp, pool_size=1, **settings)
    if done * 4 % new_dp:
        with pytest.raises(ValueError, match=f"no step of dp_size={new_dp} starts"):
            resumed[0].load_state_dict(old.state_dict())
        return
    for sampler in resumed:
        sampler.load_state_dict(old.state_dict())
    rest = np.stack([list(sampler) for sampler in resumed], axis=1)
    both = np.concatenate([schedule[:done].ravel(), rest.ravel()])
    assert windows_of(both) == windows_of(schedule)


@pytest.mark.parametrize("new_dp", [2, 8, 16])
def test_the_uniform_order_takes_another_number_of_replicas_between_optimizer_steps_only(
    new_dp: int,
) -> None:
    uniform = {"pool_size": 2, "order": "uniform"}
    old = make(**uniform)
    take(old, 2 * GBS // 4)
    resumed = ranks(dp_size=new_dp, **uniform)
    for sampler in resumed:
        sampler.load_state_dict(old.state_dict())
    rest = np.stack([list(sampler) for sampler in resumed], axis=1)
    assert windows_of(rest) == windows_of(make(**uniform).schedule())[2:]
    take(old, 2)
    with pytest.raises(ValueError, match=r"dp_size=4 inside an optimizer step \(8 of 16"):
        make(dp_size=new_dp, **uniform).load_state_dict(old.state_dict())
    make(**uniform).load_state_dict(old.state_dict())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"refine": False}, "refine=True inside an optimizer step"),
        ({"order": "index"}, "order='grouped' inside an optimizer step"),
        ({"order": "uniform"}, "order='grouped' inside an optimizer step"),
    ],
)
def test_refinement_and_order_may_change_between_optimizer_steps_only(
    changes: dict[str, Any], message: str
) -> None:
    before = make()
    take(before, GBS // 4)
    after = make(**changes)
    after.load_state_dict(before.state_dict())
    assert list(after) == make(**changes).schedule()[GBS // 4 :, 0].tolist()
    take(before, GBS // 4 + 1)
    with pytest.raises(ValueError, match=message):
        make(**changes).load_state_dict(before.state_dict())


def test_the_pool_size_may_change_between_optimizer_steps_only() -> None:
    before = make()
    take(before, GBS // 4)
    state = before.state_dict()
    after = make(pool_size=4)
    after.load_state_dict(state)
    assert list(after) == make(pool_size=4).schedule()[GBS // 4 :, 0].tolist()
    take(before, GBS // 4 + 1)
    with pytest.raises(ValueError, match=r"pool_size=2 inside an optimizer step \(4 of 16"):
        make(pool_size=4).load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match="placement='vrsp' inside an optimizer step"):
        make(placement="contiguous").load_state_dict(before.state_dict())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"global_batch": 32}, "global_batch=16, this sampler has global_batch=32"),
        ({"seed": 8}, "seed=7, this sampler has seed=8"),
        ({"shuffle": False}, "shuffle=True, this sampler has shuffle=False"),
        ({"drop_last": False}, "drop_last=True, this sampler has drop_last=False"),
        ({"lengths_of_packs": whole_windows(4)}, "corpus='96 packs, .*corpus='64 packs, "),
        ({"lengths_of_packs": whole_windows()[::-1]}, "corpus='96 packs, .*corpus='96 packs, "),
    ],
)
def test_a_state_of_other_optimizer_steps_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes).load_state_dict(make().state_dict())


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda s: s.pop("seed"), "lacks seed"),
        (lambda s: s.update(epoch=-1), "epoch of the state is -1"),
        (lambda s: s.update(consumed_packs=2.0), "consumed_packs of the state is 2.0"),
        (lambda s: s.update(consumed_packs=1000), "consumed_packs=1000, but an epoch has 96"),
        (lambda s: s.update(consumed_packs=2), "lies 2 packs into .* dp_size=4"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    sampler = make()
    state = sampler.state_dict()
    damage(state)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    assert list(sampler) == make().schedule(0)[:, 0].tolist()


# Loaders


class PackIds(Dataset[int]):
    """A dataset whose item is its index."""

    def __init__(self, packs: int) -> None:
        self.packs = packs

    def __len__(self) -> int:
        return self.packs

    def __getitem__(self, index: int) -> int:
        return index


def loader(workers: int, **changes: Any) -> StatefulDataLoader:
    return StatefulDataLoader(
        PackIds(6 * GBS), sampler=make(**changes), batch_size=1, num_workers=workers
    )


def ids(batches: list[torch.Tensor]) -> list[int]:
    return [int(batch) for batch in batches]


def test_a_plain_data_loader_takes_it_as_its_sampler() -> None:
    plain = DataLoader(PackIds(6 * GBS), sampler=make(), batch_size=1)
    assert ids(list(plain)) == make().schedule(0)[:, 0].tolist()
    assert len(plain) == len(make())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 6, 23, 24])
def test_a_stateful_loader_resumes_exactly(workers: int, done: int) -> None:
    before = loader(workers)
    before.sampler.set_epoch(1)
    walk = iter(before)
    seen = ids([next(walk) for _ in range(done)])
    state = before.state_dict()
    del walk
    after = loader(workers)
    after.load_state_dict(state)
    after.sampler.set_epoch(1)
    assert seen + ids(list(after)) == make().schedule(1)[:, 0].tolist()
    after.sampler.set_epoch(2)
    assert ids(list(after)) == make().schedule(2)[:, 0].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_that_finished_an_epoch_resumes_at_the_next(workers: int) -> None:
    before = loader(workers)
    list(before)
    after = loader(workers)
    after.load_state_dict(before.state_dict())
    after.sampler.set_epoch(1)
    assert ids(list(after)) == make().schedule(1)[:, 0].tolist()
    after.sampler.set_epoch(2)
    assert ids(list(after)) == make().schedule(2)[:, 0].tolist()


def test_workers_that_persist_begin_each_epoch_at_its_start() -> None:
    persistent = StatefulDataLoader(
        PackIds(6 * GBS), sampler=make(), num_workers=2, persistent_workers=True
    )
    for epoch in range(3):
        persistent.sampler.set_epoch(epoch)
        assert ids(list(persistent)) == make().schedule(epoch)[:, 0].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_loaded_into_the_sampler_itself_reaches_the_loader(workers: int) -> None:
    sampler = make()
    take(sampler, 7)
    after = loader(workers)
    after.sampler.load_state_dict(sampler.state_dict())
    assert ids(list(after)) == make().schedule(0)[7:, 0].tolist()


def test_a_state_taken_before_the_first_step_of_a_later_pass_is_its_start() -> None:
    before = loader(2)
    list(before)
    before.sampler.set_epoch(0)
    walk = iter(before)
    state = before.state_dict()
    del walk
    after = loader(2)
    after.load_state_dict(state)
    assert ids(list(after)) == make().schedule(0)[:, 0].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_with_another_number_of_replicas(workers: int) -> None:
    before = loader(workers, dp_size=4)
    walk = iter(before)
    ids([next(walk) for _ in range(6)])  # 24 packs of all replicas: the middle of the second window
    state = before.state_dict()
    del walk
    rest = []
    for rank in range(2):
        after = loader(workers, dp_size=2, dp_rank=rank)
        after.load_state_dict(state)
        rest.append(ids(list(after)))
    schedule = make().schedule()
    both = np.concatenate([schedule[:6].ravel(), np.stack(rest, axis=1).ravel()])
    assert both.tolist() == schedule.ravel().tolist()
