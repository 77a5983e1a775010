"""A pool of one rank: what it shows, and the microbatches that it makes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import libra

CONFIG = libra.PoolConfig(pool_size=1, chunks=1)
HEADS = libra.HeadShape(2, 1, 4, 8)


def test_a_pool_shows_few_things_only(mesh: DeviceMesh) -> None:
    pool = libra.SequencePool(mesh, CONFIG)
    shown = {name for name in dir(pool) if not name.startswith("_")}
    assert shown == {"close", "config", "groups", "membership", "microbatch", "prefetch"}
    assert pool.config == CONFIG
    assert pool.membership.ranks == (0,)
    assert repr(pool).startswith("SequencePool(ranks=[0], worker=0, cp=1, PoolConfig(pool_size=1")


def test_a_pool_is_logged_when_it_is_made(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "libra"):
        pool = libra.SequencePool(mesh, CONFIG)
    assert [record.message for record in caplog.records] == [f"made {pool!r}"]


def test_groups_serve_another_pool(mesh: DeviceMesh) -> None:
    first = libra.SequencePool(mesh, CONFIG)
    first.close()
    second = libra.SequencePool(mesh, CONFIG, groups=first.groups)
    assert second.groups is first.groups
    assert second.microbatch([0, 4]).rows == 4


def test_bounds_may_be_a_tensor_and_end_in_padding(mesh: DeviceMesh) -> None:
    pool = libra.SequencePool(mesh, CONFIG)
    microbatch = pool.microbatch(torch.tensor([0, 3]), tokens=4)
    assert (microbatch.tokens, microbatch.rows) == (4, 4)
    assert microbatch.cu_seqlens[0].tolist() == [0, 3]


@pytest.mark.parametrize("wrong", [[1, 4], [0, 3, 2], ["a"]])
def test_wrong_bounds_are_refused(mesh: DeviceMesh, wrong: list[object]) -> None:
    pool = libra.SequencePool(mesh, CONFIG)
    with pytest.raises(ValueError):
        pool.microbatch(wrong)
    with pytest.raises(ValueError):
        pool.prefetch([wrong])
    assert pool.microbatch([0, 4]).tokens == 4


def test_prefetch_takes_a_pack_of_each_replica(mesh: DeviceMesh) -> None:
    pool = libra.SequencePool(mesh, CONFIG)
    with pytest.raises(ValueError, match="prefetch got 2 packs for a pool of pool_size=1"):
        pool.prefetch([[0, 4], [0, 4]])


def test_a_prefetched_microbatch_is_used_and_earlier_ones_are_dropped(mesh: DeviceMesh) -> None:
    pool = libra.SequencePool(mesh, CONFIG, heads=HEADS)
    for bounds in ([0, 4], [0, 2, 4], [0, 8]):
        pool.prefetch([bounds])
    first, second, third = pool._runtime.prefetched
    assert pool.microbatch([0, 2, 4]) is second
    assert pool._runtime.prefetched == [third]
    assert pool.microbatch([0, 5]) is not third
    assert pool.microbatch([0, 8]) is third
    assert [len(each._planned) for each in (first, second, third)] == [1, 1, 1]


def test_a_head_shape_once_met_is_planned_for_all_that_follow(mesh: DeviceMesh) -> None:
    pool = libra.SequencePool(mesh, CONFIG)
    pool.prefetch([[0, 4]])
    (ahead,) = pool._runtime.prefetched
    assert not ahead._planned
    q, kv = torch.randn(4, 2, 4, dtype=torch.float64), torch.randn(4, 1, 4, dtype=torch.float64)
    with pool.microbatch([0, 1, 4]):
        libra.libra_attention(q, kv, kv)
    assert list(ahead._planned) == [HEADS]


def test_a_closed_pool_plans_no_more(mesh: DeviceMesh) -> None:
    pool = libra.SequencePool(mesh, CONFIG, heads=HEADS)
    pool.close()
    assert pool._runtime.workspace.nbytes == 0
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.microbatch([0, 4])
