"""How an attention call finds its microbatch."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import libra
from libra.runtime.microbatch import INNERMOST, find_microbatch

CONFIG = libra.PoolConfig(pool_size=1, chunks=1)
HEADS = libra.HeadShape(2, 1, 4, 8)


@pytest.fixture
def pool(mesh: DeviceMesh) -> libra.SequencePool:
    return libra.SequencePool(mesh, CONFIG, live_microbatches=2)


def test_there_is_none_outside_a_with_block() -> None:
    with pytest.raises(RuntimeError, match=r"outside a microbatch: wrap the forward in `with pool"):
        find_microbatch(INNERMOST)


def test_the_innermost_one_is_found(pool: libra.SequencePool) -> None:
    outer, inner = pool.microbatch([0, 4]), pool.microbatch([0, 4])
    with outer:
        with inner, outer:
            assert find_microbatch(INNERMOST) is outer
        assert find_microbatch(INNERMOST) is outer
        with inner:
            assert find_microbatch(INNERMOST) is inner
            assert find_microbatch(outer.serial) is outer
    with pytest.raises(RuntimeError):
        find_microbatch(INNERMOST)


def test_serials_never_say_innermost(pool: libra.SequencePool) -> None:
    assert pool.microbatch([0, 4]).serial > INNERMOST


def test_a_freed_one_says_which_setting_to_raise(pool: libra.SequencePool) -> None:
    first = pool.microbatch([0, 4]).serial
    assert find_microbatch(first).serial == first
    for _ in range(2):
        pool.microbatch([0, 4])
    with pytest.raises(RuntimeError, match=rf"microbatch {first} was freed .*live_microbatches"):
        find_microbatch(first)


def test_a_plan_is_asked_for_by_its_head_shape(pool: libra.SequencePool) -> None:
    microbatch = pool.microbatch([0, 4])
    with pytest.raises(ValueError, match="exactly one planned head shape; there are 0"):
        microbatch.plan()
    assert microbatch.plan(HEADS) is microbatch.plan()
    microbatch.plan(libra.HeadShape(4, 1, 4, 8))
    with pytest.raises(ValueError, match="there are 2"):
        microbatch.plan()


def test_calls_are_counted_and_plans_made_once(pool: libra.SequencePool) -> None:
    q, kv = torch.randn(4, 2, 4), torch.randn(4, 1, 4)
    with pool.microbatch([0, 4]) as microbatch:
        for _ in range(3):
            libra.libra_attention(q, kv, kv)
    assert microbatch.calls == 3
    assert len(microbatch._executors) == len(microbatch._planned) == 1
