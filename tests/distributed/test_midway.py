"""A call that ends midway leaves messages under way and ranks out of step: no later call may go on
as if nothing had happened.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import libra
from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.cpu import CpuKernel
from tests.distributed.cases import make_mesh
from tests.distributed.ranks import RankPool

TOKENS = 64
LONG, SHORT = [0, TOKENS], [*range(0, TOKENS + 1, 8)]
HEADS = libra.HeadShape(4, 2, 8, 4)


class FailingKernel:
    """Works, until it is told to fail."""

    def __init__(self) -> None:
        self._kernel = CpuKernel()
        self.fails = ""

    def prepare(self, call: AttentionCall, device: torch.device) -> Any:
        return self._kernel.prepare(call, device)

    def forward(self, *call: Any) -> None:
        self._call("forward", call)

    def backward(self, *call: Any) -> None:
        self._call("backward", call)

    def _call(self, way: str, call: tuple[Any, ...]) -> None:
        if self.fails == way:
            raise MemoryError("out of memory")
        getattr(self._kernel, way)(*call)


def what_follows(rank: int, world_size: int, way: str) -> list[str]:
    """How a call ends whose kernels fail on every rank, and what is tried after it."""
    kernel = FailingKernel()
    config = libra.PoolConfig(pool_size=world_size, chunks=2)
    pool = libra.SequencePool(make_mesh(world_size, 1), config, heads=HEADS, kernel=kernel)
    qkv = [torch.randn(TOKENS, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    told = []

    def attempt(call: Any) -> None:
        try:
            call()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    with pool.microbatch(LONG if rank == 0 else SHORT) as microbatch:
        out = libra.libra_attention(*qkv)
        kernel.fails = way
        if way == "forward":
            attempt(lambda: libra.libra_attention(*qkv))
        else:
            attempt(lambda: out.sum().backward())
        assert pool._runtime.workspace.nbytes == 0
        kernel.fails = ""
        attempt(lambda: libra.libra_attention(*qkv, microbatch=microbatch))
        attempt(lambda: libra.libra_attention(*qkv, microbatch=microbatch).sum().backward())
    attempt(lambda: pool.microbatch(SHORT))
    pool.close()
    return told


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_every_later_call_is_refused_on_every_rank(ranks2: RankPool, way: str) -> None:
    for failed, *refused in ranks2.run(what_follows, way):
        assert failed == "MemoryError: out of memory"
        assert len(refused) == 3
        for error in refused:
            assert error.startswith("ValueError: workers 0, 1: an attention call ended midway (Mem")
            assert "make a new pool" in error
