"""What attention takes beyond its results is what the plan promises, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import libra
from libra.plan.attention_calls import AttentionCall
from libra.plan.memory import PoolMemory, pool_memory
from libra.plan.rank_plan import make_rank_plan
from tests.distributed.cases import Case, make_mesh, make_pack, make_pool, my_rows
from tests.distributed.memory_tracker import tracked
from tests.distributed.ranks import RankPool

TOKENS = 4096
LONG, SHORT = [0, TOKENS], [*range(0, TOKENS + 1, 64)]
SMALL = 8192
"""Bytes of the tensors that carry no row: what ranks agree on, the microbatch's number."""


class NoKernel:
    """Computes nothing and allocates nothing: all that is tracked is the runtime's."""

    def prepare(self, call: AttentionCall, device: torch.device) -> None: ...

    def forward(self, *call: Any) -> None: ...

    def backward(self, *call: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """Bytes beyond the results, on one rank."""

    first: int
    """Peak of a forward and backward of a pool that has no workspace yet."""
    next: int
    """Peak of another layer, which finds it."""
    workspace: int
    promised_kept: int
    promised_workspace: int


def track(rank: int, world_size: int, case: Case) -> Tracked:
    """A layer that makes the workspace, then one that finds it."""
    groups = make_pool(world_size, case.cp, case.config).groups
    mesh = make_mesh(world_size, case.cp)
    pool = libra.SequencePool(mesh, case.config, kernel=NoKernel(), groups=groups)
    replica = rank // case.cp
    rows = my_rows(case, rank % case.cp)
    *qkv, dout = (tensor[rows] for tensor in make_pack(case, replica))
    qkv = [tensor.requires_grad_() for tensor in qkv]
    with pool.microbatch(case.bounds[replica], tokens=case.tokens) as microbatch:
        torch.autograd.grad(libra.libra_attention(*qkv), qkv, dout)  # plans and prepares
        peaks = []
        for _ in range(2):  # a thread of the transport may hold a buffer for a moment longer
            pool._runtime.workspace.release()
            with tracked() as first:
                torch.autograd.grad(libra.libra_attention(*qkv), qkv, dout)
            peaks.append(first.nbytes)
        with tracked() as following:
            out = libra.libra_attention(*qkv)
            torch.autograd.grad(out, qkv, dout)
    plan = microbatch.plan()
    memory: PoolMemory = pool_memory(plan)
    worker = rank % plan.workers
    lse = make_rank_plan(plan, worker).lse_size * 4
    results = out.nbytes + lse + sum(tensor.nbytes for tensor in qkv)
    workspace = pool._runtime.workspace.nbytes
    pool.close()
    return Tracked(
        first=min(peaks) - results,
        next=following.nbytes - results,
        workspace=workspace,
        promised_kept=int(memory.kept[worker]),
        promised_workspace=int(memory.workspace[worker]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cp", [1, 2])
def test_peaks_are_what_the_plan_promises(ranks4: RankPool, cp: int, dtype: torch.dtype) -> None:
    apart = dtype == torch.bfloat16  # every worker a node of its own: multicasts
    for backward, per_node in (("retain", 1 if apart else 8), ("refetch", 8 if apart else 1)):
        config = libra.PoolConfig(
            pool_size=4 // cp, chunks=2, backward=backward, ranks_per_node=per_node
        )
        bounds = [LONG, SHORT, SHORT, SHORT][: 4 // cp]
        heads = 8, 4, 16, 16 if dtype == torch.bfloat16 else 32  # equal rows return to their place
        case = Case(bounds=bounds, tokens=TOKENS, cp=cp, heads=heads, dtype=dtype, config=config)
        for rank in ranks4.run(track, case):
            workspace, kept = rank.promised_workspace, rank.promised_kept
            assert rank.workspace == workspace > 0
            assert 0 <= rank.first - (workspace + kept) < SMALL
            assert 0 <= rank.next - kept < SMALL
