"""Pools whose rows carry who they are, in place of numbers, for tests of the exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import libra
from libra.plan.attention_calls import AttentionCall
from libra.plan.pool_plan import PoolPlan
from libra.plan.rank_plan import make_rank_plan
from libra.runtime import device_plan
from libra.runtime.device_plan import DevicePlan, Operands, make_device_plan
from libra.runtime.exchange import Exchange
from libra.runtime.workspace import Space
from tests import exchange_model

CPU = torch.device("cpu")
TOKENS = 32
LONG, SHORT = [0, TOKENS], [*range(0, TOKENS + 1, 4)]


class NoKernel:
    """Computes nothing."""

    name = "none"

    def prepare(self, call: AttentionCall, device: torch.device) -> AttentionCall:
        return call

    def forward(self, *call: Any) -> None: ...

    def backward(self, *call: Any) -> None: ...


def pool_plan(kv_heads: int = 2, per_node: int = 1) -> PoolPlan:
    """Four workers, one long sample: its rows go to all of them."""
    config = libra.PoolConfig(pool_size=4, chunks=2, ranks_per_node=per_node)
    heads = libra.HeadShape(4, kv_heads, 1, 8)
    return libra.plan_pool([LONG, *[SHORT] * 3], cp_size=1, config=config, heads=heads)


@contextlib.contextmanager
def hops_posted(at_once: bool) -> Iterator[None]:
    """Both hops of K and V posted together, as on a GPU, or the second one later, as on a CPU."""
    blocks = (lambda *_: False) if at_once else device_plan.hop_blocks
    with mock.patch.object(device_plan, "hop_blocks", blocks):
        yield


def prepare(plan: PoolPlan, rank: int, dtype: torch.dtype) -> tuple[DevicePlan, Exchange]:
    """One worker's device plan, and an exchange with more workspace than it needs."""
    prepared = make_device_plan(make_rank_plan(plan, rank), plan.heads, NoKernel(), CPU)
    world = dist.group.WORLD
    assert world is not None
    return prepared, Exchange(prepared, world, Space(torch.empty(100_000, dtype=dtype)))


def operands(prepared: DevicePlan, model: exchange_model.Exchange, rank: int) -> Operands:
    """Local rows with their identities, and empty rows of other workers."""
    q, k = (
        torch.from_numpy(rows[rank]).double()[:, :, None] for rows in (model.q_local, model.k_local)
    )
    peers = (
        torch.full((elements,), torch.nan, dtype=torch.float64)
        for elements in (prepared.memory.fetched_q, prepared.memory.fetched_kv)
    )
    return prepared.operands((q, k, k + 0.5, q), *peers, torch.empty(0))
