"""Pools of 8 and 16 workers, as threads of one process: numbers equal the reference, and the loads
keep the promise of their placement.

The microbatches and planner threads of `SequencePool` belong to processes; here the executor runs
the rank plans of a plan directly.
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

import libra
from libra.plan.place_surplus import column_count, row_step
from libra.plan.plan_pool import plan_pool
from libra.plan.pool_plan import PoolPlan
from libra.plan.rank_plan import make_rank_plan
from libra.runtime.device_plan import make_device_plan
from libra.runtime.executor import Executor
from libra.runtime.kernels import kernel_for
from libra.runtime.workspace import Space, Workspace
from tests.distributed.cases import Case, make_pack, my_rows, reference
from tests.distributed.threads import threaded_ranks

CPU = torch.device("cpu")


def attend_by_plan(rank: int, world_size: int, case: Case, plan: PoolPlan) -> list[torch.Tensor]:
    """out, dq, dk and dv of one worker's rows."""
    world = dist.group.WORLD
    assert world is not None
    replica, cp_rank = divmod(rank, case.cp)
    refetch = case.config.backward == "refetch"
    rank_plan = make_rank_plan(plan, rank)
    device_plan = make_device_plan(rank_plan, plan.heads, kernel_for(CPU), CPU, refetch=refetch)
    workspace = SpoiltWorkspace()
    q, k, v, dout = (tensor[my_rows(case, cp_rank)] for tensor in make_pack(case, replica))
    scale = q.shape[2] ** -0.5
    executor = Executor(device_plan, world, workspace)
    saved = executor.forward(q, k, v, scale, save_for_backward=True)
    gradients = executor.backward(dout, saved, scale)
    return [saved.out_TNE, *gradients]


class SpoiltWorkspace(Workspace):
    """A workspace in which earlier calls left nothing that a later one could use."""

    def open(self, device: torch.device, *parts: tuple[torch.dtype, int]) -> list[Space]:
        """Room that holds no number."""
        for space, (_, elements) in zip(super().open(device, *parts), parts, strict=True):
            space.take(elements).fill_(torch.nan)
        return super().open(device, *parts)


def check(case: Case) -> PoolPlan:
    """Plan and run a case, and hold it against the reference and its placement's promise."""
    plan = check_numbers(case)
    assert plan.load.sum() == plan.home_load.sum()
    assert plan.load.max() <= promised_load(plan)
    return plan


def check_numbers(case: Case) -> PoolPlan:
    """Plan and run a case, and hold it against the reference."""
    hq, hkv, dim, value_dim = case.heads
    plan = plan_pool(
        case.bounds,
        cp_size=case.cp,
        config=case.config,
        heads=libra.HeadShape(hq, hkv, dim, case.dtype.itemsize, value_dim),
        tokens=case.tokens,
    )
    got = threaded_ranks(plan.workers, attend_by_plan, case, plan)
    for replica in range(len(case.bounds)):
        wanted = reference(case, replica)
        for cp_rank in range(case.cp):
            rows = my_rows(case, cp_rank)
            for mine, whole in zip(got[replica * case.cp + cp_rank], wanted, strict=True):
                torch.testing.assert_close(mine, whole[rows], rtol=0, atol=1e-12)
    return plan


def promised_load(plan: PoolPlan) -> float:
    """Largest load that the placement allows itself: a part that can't be cut may pass the target.

    `surplus` moves whole rows, at most all pairs of the last one; `paper` moves whole tiles, and
    one that fits nowhere goes to a worker that is no busier than the mean.
    """
    mean = float(plan.load.mean())
    target = (1 + plan.config.tolerance) * mean
    if plan.config.placement == "paper":
        return max(target, mean + int(plan.geometry.block_pairs.max()) * plan.heads.q / plan.shards)
    columns = column_count(plan.heads, plan.config.head_shards, plan.config.chunks)
    return target + row_step(plan.tokens) * plan.tokens * plan.heads.q / columns


@st.composite
def pools(draw: st.DrawFn, workers: int) -> Case:
    cp = draw(st.sampled_from([1, 2, 4, workers]))
    packs = workers // cp
    tokens = draw(st.sampled_from([32, 61, 96]))
    cuts = st.sets(st.integers(1, tokens), max_size=6)
    heads = draw(st.sampled_from([(4, 2), (4, 4), (8, 2), (12, 3)]))
    return Case(
        bounds=[sorted({0, *draw(cuts)}) for _ in range(packs)],
        tokens=tokens,
        cp=cp,
        heads=(*heads, 4, 4),
        seed=draw(st.integers(0, 99)),
        config=libra.PoolConfig(
            pool_size=packs,
            block_size=draw(st.sampled_from([3, 8, 64])),
            head_shards=draw(st.sampled_from([1, 2])),
            chunks=draw(st.sampled_from([1, 2])),
            placement=draw(st.sampled_from(["surplus", "paper"])),
            shard_layout=draw(st.sampled_from(["contiguous", "zigzag"])),
            backward=draw(st.sampled_from(["retain", "refetch"])),
        ),
    )


@settings(max_examples=20)
@given(case=pools(8))
def test_eight_workers_equal_the_reference(case: Case) -> None:
    check(case)


@settings(max_examples=10)
@given(case=pools(16))
def test_sixteen_workers_equal_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("packs, cp", [(8, 1), (16, 1), (4, 4), (2, 8), (1, 16)])
@pytest.mark.parametrize("shard_layout", ["contiguous", "zigzag"])
def test_one_long_sample_among_short_ones_keeps_all_workers_busy(
    packs: int, cp: int, shard_layout: str
) -> None:
    tokens = 256
    short = list(range(0, tokens + 1, 16))
    config = libra.PoolConfig(pool_size=packs, chunks=2).replace(shard_layout=shard_layout)
    plan = check(
        Case(bounds=[[0, tokens], *[short] * (packs - 1)], tokens=tokens, cp=cp, config=config)
    )
    assert plan.imbalance < 0.1
    if shard_layout == "contiguous":
        assert plan.home_load.max() > 1.5 * plan.load.mean()


@pytest.mark.parametrize("head_shards, chunks", [(1, 4), (8, 5), (40, 1)])
def test_forty_query_heads_over_eight_on_sixteen_workers(head_shards: int, chunks: int) -> None:
    config = libra.PoolConfig(pool_size=1, block_size=8, head_shards=head_shards, chunks=chunks)
    case = Case(bounds=[[0, 40, 48]], tokens=48, cp=16, heads=(40, 8, 4, 4), config=config)
    check(case)
    check(dataclasses.replace(case, config=config.replace(placement="paper")))


def test_ulysses_refuses_forty_query_heads_on_sixteen_workers() -> None:
    config = libra.PoolConfig(pool_size=1, placement="ulysses", chunks=1)
    with pytest.raises(ValueError, match=r"got 40 query heads \(8 key/value\) at CP 16; choose"):
        plan_pool([[0, 48]], cp_size=16, config=config, heads=libra.HeadShape(40, 8, 4))
