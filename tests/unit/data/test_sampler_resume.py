"""Resuming: exact at any step of any epoch, through any loader, with any number of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from libra.data.sampler import PoolSampler
from tests.unit.data.samplers import GBS, PLAIN, make, ranks, whole_windows, windows_of


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
