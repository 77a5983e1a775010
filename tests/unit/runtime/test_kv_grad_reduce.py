"""Gradients of K and V add up at the workers that hold the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from libra.plan.pool_plan import PoolPlan
from libra.runtime.kv_grad_reduce import CastScratch, KVGradReduce, add_rows
from tests import exchange_model
from tests.distributed.threads import threaded_ranks
from tests.unit.runtime.exchange_cases import hops_posted, operands, pool_plan, prepare


def reduced(
    rank: int,
    world_size: int,
    plan: PoolPlan,
    model: exchange_model.Exchange,
    dtype: torch.dtype,
) -> list[list[float]]:
    """Local gradient of K, where each buffer row's gradient is the row's identity."""
    prepared, exchange = prepare(plan, rank, dtype)
    accum = torch.promote_types(dtype, torch.float32)
    k = operands(prepared, model, rank).k
    rows = [torch.from_numpy(rows).flatten() for rows in model.k_fetched[rank]]
    dk = type(k)(
        torch.zeros_like(k.local, dtype=accum), torch.cat(rows).to(accum), k.starts, k.heads, k.dim
    )
    scratch = CastScratch(torch.empty(9999, dtype=accum), torch.empty(9999, dtype=accum))
    reduces = [
        KVGradReduce(exchange, scratch, buffer, dk)
        for chunk in range(prepared.chunks)
        for buffer in prepared.kv_returns[chunk]
    ]
    for step in ("collect", "send", "finish"):
        for reduce in reduces:
            getattr(reduce, step)()
    local: list[list[float]] = dk.local[:, :, 0].tolist()
    return local


@pytest.mark.usefixtures("eager_multicasts")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("at_once", [False, True])
def test_each_row_gets_the_gradients_of_all_its_readers(
    at_once: bool, kv_heads: int, dtype: torch.dtype
) -> None:
    plan = pool_plan(kv_heads)
    model = exchange_model.exchange(plan)
    with hops_posted(at_once):
        got = threaded_ranks(4, reduced, plan, model, dtype)
    buffers = [rows.flatten() for worker in model.k_fetched for rows in worker]
    readers = np.bincount(np.concatenate(buffers), minlength=4 * plan.tokens * kv_heads)
    assert readers.max() > 2
    for local, rows in zip(got, model.k_local, strict=True):
        # Partial sums travel in bf16: 8 bits hold the identities and not all of their sums.
        tolerance = 0 if dtype == torch.float64 else 2**-7
        np.testing.assert_allclose(local, rows * readers[rows], rtol=tolerance)


def test_rows_of_one_worker_are_added_after_those_of_the_one_before() -> None:
    sums, index = torch.zeros(2, 1), torch.tensor([0, 1, 0])
    rows = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.bfloat16)
    add_rows(sums, index, [(0, 2), (2, 3)], rows, scratch=torch.empty(2))
    assert sums.tolist() == [[5.0], [2.0]]
