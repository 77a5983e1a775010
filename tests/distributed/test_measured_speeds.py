"""Measured speeds: every rank plans with the same ones, and a slow rank gets less to do."""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import libra
from libra.runtime import speed
from tests.distributed.cases import Case, attention_case, compare, make_pack, make_pool, my_rows
from tests.distributed.ranks import RankPool

CASE = Case(
    bounds=[[0, 512], list(range(0, 513, 32))],
    tokens=512,
    cp=2,
    heads=(8, 4, 16, 16),
    config=libra.PoolConfig(pool_size=2, chunks=2, speeds="measured"),
)


def train(rank: int, world_size: int, slow: int) -> tuple[list[int], list[list[int] | None], float]:
    """Three microbatches in which one rank's clock runs ten times too fast, so that its kernels
    seem slow: loads of the last plan, speeds of each plan, and the worst error of all.
    """
    replica, cp_rank = rank // CASE.cp, rank % CASE.cp
    *qkv, dout = (tensor[my_rows(CASE, cp_rank)] for tensor in make_pack(CASE, replica))
    qkv = [tensor.requires_grad_() for tensor in qkv]
    rate = 10 if rank == slow else 1
    clock = SimpleNamespace(perf_counter=lambda: rate * time.perf_counter())
    speeds, worst = [], 0.0
    with mock.patch.object(speed, "time", clock):
        pool = make_pool(world_size, CASE.cp, CASE.config)
        for _ in range(3):
            with pool.microbatch(CASE.bounds[replica], tokens=CASE.tokens) as microbatch:
                out = libra.libra_attention(*qkv)
                gradients = torch.autograd.grad(out, qkv, dout)
            plan = microbatch.plan()
            speeds.append(None if plan.speeds is None else plan.speeds.tolist())
            got = [out.detach(), *gradients]
            worst = max(worst, compare(CASE, replica, cp_rank, got, []).worst)
    pool.close()
    return plan.load.tolist(), speeds, worst


@pytest.mark.parametrize("slow", [0, 3])
def test_a_rank_that_measures_slow_gets_less_work_and_the_numbers_stay_right(
    ranks4: RankPool, slow: int
) -> None:
    results = ranks4.run(train, slow)
    assert all(result[:2] == results[0][:2] for result in results)
    load, speeds, _ = results[0]
    assert speeds[0] is None  # nothing is measured yet
    assert np.argmin(speeds[-1]) == slow == np.argmin(load)
    assert load[slow] < 0.5 * np.mean(load)
    assert max(worst for *_, worst in results) <= 1e-12


def test_measuring_is_off_unless_asked_for(ranks4: RankPool) -> None:
    config = CASE.config.replace(speeds="equal")
    case = Case(bounds=CASE.bounds, tokens=512, cp=2, heads=CASE.heads, config=config)
    loads = {tuple(errors.load) for errors in ranks4.run(attention_case, case)}
    assert len(loads) == 1
