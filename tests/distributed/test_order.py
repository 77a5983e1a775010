"""Every rank of a pool issues the same collectives in the same order, whatever it has to compute
and however autograd is made to run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import libra
from tests.distributed.cases import make_pool
from tests.distributed.collective_log import Log, recorded
from tests.distributed.ranks import RankPool
from tests.reference import block_diagonal_attention

TOKENS = 32
LONG, SHORT, EMPTY = [0, TOKENS], list(range(0, TOKENS + 1, 4)), [0]
HEADS, KV_HEADS, DIM = 4, 2, 8
PAPER = libra.PoolConfig(pool_size=2, block_size=TOKENS, chunks=2, placement="paper", tolerance=9.0)
"""With so high a target every tile stays at home."""
SPREAD = libra.PoolConfig(pool_size=2, block_size=4, chunks=2)


def make_inputs(rank: int, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(rows, heads, DIM, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return libra.libra_attention(2 * q, k, v)


def forward_and_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    attend(q, k, v).sum().backward()  # the gradient of a sum is expanded, not contiguous


def without_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    with torch.no_grad():
        attend(q, k, v)
    assert attend(q.detach(), k.detach(), v.detach()).grad_fn is None


def recomputed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reentrant: bool) -> None:
    checkpoint(attend, q, k, v, use_reentrant=reentrant).sum().backward()


def saved_by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    context = partial(create_selective_checkpoint_contexts, save_attention)
    out = checkpoint(attend, q, k, v, use_reentrant=False, context_fn=context)
    out.sin().sum().backward()


def save_attention(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    named = op == torch.ops.libra.attention.default
    return CheckpointPolicy.MUST_SAVE if named else CheckpointPolicy.PREFER_RECOMPUTE


def backward_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    out = attend(q, k, v).sum()
    first = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v))
    assert all(map(torch.equal, first, second))


class Stop(torch.autograd.Function):
    """Passes its input on and no gradient back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def no_gradient_arrives(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Two layers; on rank 1 no gradient reaches the first through its output."""
    out = attend(q, k, v)
    passed = Stop.apply(out) if torch.distributed.get_rank() % 2 else out
    attend(passed + q, k, v).sum().backward()


RUNS: dict[str, Callable[..., None]] = {
    "forward and backward": forward_and_backward,
    "without gradient": without_gradient,
    "recomputed": partial(recomputed, reentrant=False),
    "recomputed, reentrant": partial(recomputed, reentrant=True),
    "saved by name": saved_by_name,
    "backward twice": backward_twice,
    "no gradient arrives": no_gradient_arrives,
}


def order_of(
    rank: int, world_size: int, run: str, cp: int, config: libra.PoolConfig, bounds: Any
) -> tuple[Log, list[int]]:
    """What a run issues, and the loads of its plan."""
    pool = make_pool(world_size, cp, config)
    rows = len(libra.local_positions(TOKENS, cp, rank % cp, config.shard_layout))
    inputs = make_inputs(rank, rows)
    with recorded() as log, pool.microbatch(bounds[rank // cp], tokens=TOKENS) as microbatch:
        RUNS[run](*inputs)
    load = microbatch.plan().load.tolist()
    pool.close()
    return log, load


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("backward", ["retain", "refetch"])
def test_the_order_is_one_when_work_moves(ranks4: RankPool, run: str, backward: str) -> None:
    config = SPREAD.replace(pool_size=4, backward=backward)
    logs, loads = zip(*ranks4.run(order_of, run, 1, config, [LONG, *[SHORT] * 3]), strict=True)
    assert all(log == logs[0] for log in logs)
    assert logs[0].exchanges > 0 and min(loads[0]) > 0


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("backward", ["retain", "refetch"])
def test_the_order_is_one_when_two_ranks_compute_and_move_nothing(
    ranks4: RankPool, run: str, backward: str
) -> None:
    config = PAPER.replace(backward=backward)
    logs, loads = zip(*ranks4.run(order_of, run, 2, config, [LONG, EMPTY]), strict=True)
    assert all(log == logs[0] for log in logs)
    assert logs[0].exchanges > 0 and loads[0][2:] == [0, 0]


@pytest.mark.parametrize("bounds", [[SHORT, SHORT], [EMPTY, EMPTY], [LONG, EMPTY]])
def test_where_nothing_moves_no_rank_exchanges(ranks2: RankPool, bounds: Any) -> None:
    logs = [log for log, _ in ranks2.run(order_of, "forward and backward", 1, PAPER, bounds)]
    assert logs[0] == logs[1]
    assert logs[0].exchanges == 0


def exchanges_of_both_passes(rank: int, world_size: int, backward: str) -> tuple[int, int]:
    pool = make_pool(world_size, 1, SPREAD.replace(backward=backward))
    with recorded() as log, pool.microbatch(SHORT if rank else LONG):
        out = attend(*make_inputs(rank, TOKENS)).sum()
        forward = log.exchanges
        out.backward()
    pool.close()
    return forward, log.exchanges - forward


def test_retained_rows_are_not_fetched_again(ranks2: RankPool) -> None:
    """Two chunks move Q, K, V and O forward; dO, dQ, dK and dV backward, or Q, K and V once
    more.
    """
    ((retain_forward, retain_backward),) = set(ranks2.run(exchanges_of_both_passes, "retain"))
    ((refetch_forward, refetch_backward),) = set(ranks2.run(exchanges_of_both_passes, "refetch"))
    assert retain_forward == refetch_forward == retain_backward
    assert retain_backward < refetch_backward <= 2 * retain_backward


def refused_backward(rank: int, world_size: int, double: bool) -> tuple[str, Log]:
    pool = make_pool(world_size, 1, SPREAD)
    with pool.microbatch(SHORT if rank else LONG):
        inputs = make_inputs(rank, TOKENS)
        out = attend(*inputs).pow(2).sum()
        first = torch.autograd.grad(out, inputs, create_graph=double)
        with recorded() as log, pytest.raises(RuntimeError) as error:
            torch.autograd.grad(first[0].sum() if double else out, inputs)
    pool.close()
    return str(error.value), log


@pytest.mark.parametrize(
    "double, told", [(True, "no autograd formula was registered"), (False, "a second time")]
)
def test_a_refused_backward_issues_nothing(ranks2: RankPool, double: bool, told: str) -> None:
    for error, log in ranks2.run(refused_backward, double):
        assert told in error
        assert log == Log()


def two_pools(rank: int, world_size: int) -> tuple[float, Log]:
    """The first two ranks make three calls in two microbatches, the others one call in one."""
    pool = make_pool(world_size, 1, SPREAD)
    pool_index, worker = divmod(rank, 2)
    worst = 0.0
    with recorded() as log:
        for bounds, calls in [((LONG, SHORT), 2), ((SHORT, EMPTY), 1)][: 2 - pool_index]:
            with pool.microbatch(bounds[(worker + pool_index) % 2], tokens=TOKENS):
                for _ in range(calls - pool_index):
                    q, k, v = make_inputs(rank, TOKENS)
                    out = libra.libra_attention(q, k, v)
                    right = block_diagonal_attention(q, k, v, bounds[(worker + pool_index) % 2])
                    worst = max(worst, float((out - right).abs().max()))
                    out.sum().backward()
    pool.close()
    return worst, log


def test_two_pools_side_by_side_never_meet(ranks4: RankPool) -> None:
    outcomes = ranks4.run(two_pools)
    assert max(worst for worst, _ in outcomes) < 1e-12
    logs = [log for _, log in outcomes]
    assert logs[0] == logs[1] and logs[2] == logs[3]
    assert logs[0].exchanges > logs[2].exchanges > 0
    for log, members in [(logs[0], (0, 1)), (logs[2], (2, 3))]:
        assert {call.ranks for call in [*log.calls, *log.planning]} == {members}


def compiled(rank: int, world_size: int) -> tuple[int, float, Log]:
    """Four microbatches of one compiled function: frames compiled, error, collectives."""
    pool = make_pool(world_size, 1, SPREAD)
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(lambda q, k, v: attend(q, k, v).sin(), backend=counter, fullgraph=True)
    worst = 0.0
    with recorded() as log:
        for microbatch in range(4):
            bounds = [0, 8 * (microbatch + 1), TOKENS] if rank else LONG
            q, k, v = make_inputs(rank, TOKENS)
            with pool.microbatch(bounds):
                out = fast(q, k, v)
                got = torch.autograd.grad(out.sum(), (q, k, v))
            right = block_diagonal_attention(2 * q, k, v, bounds).sin()
            wanted = torch.autograd.grad(right.sum(), (q, k, v))
            for a, b in zip((out, *got), (right, *wanted), strict=True):
                worst = max(worst, float((a - b).abs().max()))
    pool.close()
    return counter.frame_count, worst, log


def test_compiled_attention_is_compiled_once_for_all_microbatches(ranks2: RankPool) -> None:
    (frames, error, log), (other_frames, other_error, other_log) = ranks2.run(compiled, timeout=180)
    assert frames == other_frames == 1
    assert max(error, other_error) < 1e-12
    assert log == other_log
