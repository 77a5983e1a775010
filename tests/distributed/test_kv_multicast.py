"""Keys and values in two hops, and their gradients back: numbers equal the reference, runs repeat
themselves, and all ranks issue one order of collectives, whichever way the second hop is posted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import libra
from libra.config import BackwardMode
from libra.plan.plan_pool import plan_pool
from libra.plan.pool_plan import PoolPlan
from libra.runtime import device_plan
from tests.distributed import test_order
from tests.distributed.cases import Case, Errors, attention_case, make_pack, make_pool
from tests.distributed.collective_log import Log, recorded
from tests.distributed.ranks import RankPool
from tests.distributed.test_attention import TOLERANCE
from tests.distributed.test_many_ranks import check_numbers, pools

TOKENS = 128
LONG, SHORT = [0, TOKENS], list(range(0, TOKENS + 1, 8))
APART = libra.PoolConfig(
    pool_size=4, chunks=2, ranks_per_node=1, traffic_limit=math.inf, memory_limit=math.inf
)
"""Every worker a node of its own: all who need rows of the long sample pass them on."""
MODES: tuple[BackwardMode, ...] = ("retain", "refetch")
SHAPES = [(4, 4, 4, 8), (8, 2, 8, 4), (4, 1, 8, 8)]
"""K and V with each chunk, whose gradients return with each; all with the first, and the last."""


def plan_of(case: Case) -> PoolPlan:
    hq, hkv, dim, value_dim = case.heads
    return plan_pool(
        case.bounds,
        cp_size=case.cp,
        config=case.config,
        heads=libra.HeadShape(hq, hkv, dim, case.dtype.itemsize, value_dim),
        tokens=case.tokens,
    )


def multicast(backward: BackwardMode = "retain", **changes: Any) -> Case:
    """Four ranks, one long sample: a case that multicasts rows."""
    case = Case(
        **{
            "bounds": [LONG, SHORT, SHORT, SHORT],
            "tokens": TOKENS,
            "config": APART.replace(backward=backward),
            **changes,
        }
    )
    assert plan_of(case).kv_transfers.passed_on.any()
    return case


def as_posted(rank: int, world_size: int, case: Case, at_once: bool) -> Errors:
    with posted(at_once):
        return attention_case(rank, world_size, case)


@contextlib.contextmanager
def posted(at_once: bool) -> Iterator[None]:
    """The second hop posted as on a CPU, or at once as on a GPU."""
    if not at_once:
        yield
        return
    with mock.patch.object(device_plan, "hop_blocks", return_value=False):
        yield


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("heads", SHAPES)
def test_four_ranks_equal_the_reference(
    ranks4: RankPool, heads: tuple[int, int, int, int], at_once: bool
) -> None:
    for backward in MODES:
        errors = ranks4.run(as_posted, multicast(backward, heads=heads), at_once)
        assert max(e.worst for e in errors) <= 1e-12, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_also_in_lower_precision(ranks4: RankPool, dtype: torch.dtype) -> None:
    errors = ranks4.run(attention_case, multicast(dtype=dtype))
    assert max(e.worst for e in errors) <= TOLERANCE[dtype], errors


@st.composite
def pools_apart(draw: st.DrawFn, workers: int) -> Case:
    """Any pool, with nodes of few workers and no limit that would keep work at home."""
    case = draw(pools(workers))
    config = case.config.replace(
        ranks_per_node=draw(st.sampled_from([1, 2])),
        traffic_limit=math.inf,
        memory_limit=math.inf,
        placement="surplus",
    )
    return dataclasses.replace(case, config=config)


@pytest.mark.usefixtures("eager_multicasts")
@settings(max_examples=12)
@given(case=pools_apart(8))
def test_eight_workers_equal_the_reference(case: Case) -> None:
    check_numbers(case)


@pytest.mark.usefixtures("eager_multicasts")
@settings(max_examples=6)
@given(case=pools_apart(16))
def test_sixteen_workers_equal_the_reference(case: Case) -> None:
    check_numbers(case)


@pytest.mark.parametrize("packs, cp", [(8, 1), (16, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("at_once", [False, True])
def test_one_long_sample_among_short_ones(packs: int, cp: int, at_once: bool) -> None:
    tokens = 256
    short = list(range(0, tokens + 1, 16))
    config = APART.replace(pool_size=packs, backward="refetch" if at_once else "retain")
    case = Case(bounds=[[0, tokens], *[short] * (packs - 1)], tokens=tokens, cp=cp, config=config)
    with posted(at_once):
        plan = check_numbers(case)
    assert plan.kv_transfers.passed_on.sum() > 10


def twice(rank: int, world_size: int, case: Case) -> list[list[torch.Tensor]]:
    """out, dq, dk and dv of the same call, made twice."""
    pool = make_pool(world_size, case.cp, case.config)
    *qkv, dout = make_pack(case, rank)
    results = []
    for _ in range(2):
        inputs = [tensor.clone().requires_grad_() for tensor in qkv]
        with pool.microbatch(case.bounds[rank], tokens=case.tokens):
            out = libra.libra_attention(*inputs)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
    pool.close()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_repeats_itself_bit_for_bit(ranks4: RankPool, dtype: torch.dtype) -> None:
    modes = []
    for backward in MODES:
        results = ranks4.run(twice, multicast(backward, dtype=dtype, heads=(8, 2, 8, 8)))
        for first, second in results:
            assert all(map(torch.equal, first, second))
        modes.append([tensor for first, _ in results for tensor in first])
    assert all(map(torch.equal, *modes))


def order_of(rank: int, world_size: int, run: str, case: Case, at_once: bool) -> Log:
    """The collectives of a run of the order tests."""
    pool = make_pool(world_size, case.cp, case.config)
    inputs = [tensor.requires_grad_() for tensor in make_pack(case, rank)[:3]]
    with posted(at_once), recorded() as log, pool.microbatch(case.bounds[rank], tokens=case.tokens):
        test_order.RUNS[run](*inputs)
    pool.close()
    return log


@pytest.mark.parametrize("run", test_order.RUNS)
@pytest.mark.parametrize("at_once", [False, True])
def test_the_order_is_one(ranks4: RankPool, run: str, at_once: bool) -> None:
    for backward in MODES:
        case = multicast(backward, heads=(4, 4, 4, 4))
        logs = ranks4.run(order_of, run, case, at_once)
        assert all(log == logs[0] for log in logs)
        assert logs[0].exchanges > 0
