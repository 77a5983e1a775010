"""Rows arrive where kernels read them, and return to where they came from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from libra.plan.pool_plan import PoolPlan
from tests import exchange_model
from tests.distributed.threads import threaded_ranks
from tests.unit.runtime.exchange_cases import hops_posted, operands, pool_plan, prepare


def rows_arrive(
    rank: int, world_size: int, plan: PoolPlan, model: exchange_model.Exchange
) -> tuple[bool, bool]:
    """Whether this worker received queries, and passed on keys; all rows are checked."""
    prepared, exchange = prepare(plan, rank, torch.float64)
    every = operands(prepared, model, rank)
    q, k, v, _ = every
    inbound = [exchange.dispatch(chunk, every) for chunk in range(prepared.chunks)]
    for chunk in range(prepared.chunks):
        exchange.complete(chunk, inbound)
        rows = torch.from_numpy(model.k_fetched[rank][chunk])
        assert q.rows(chunk).tolist() == model.q_fetched[rank][chunk].tolist()
        assert k.rows(chunk).tolist() == rows.tolist()
        assert v.rows(chunk).tolist() == (rows + 0.5).tolist()

    # Queries go back in place of outputs: each row returns to where it was read.
    out = replace(q, local=torch.full_like(q.local, -1))
    for chunk in range(prepared.chunks):
        pending = exchange.post_return(chunk, out, inbound[chunk].q)
        if pending is not None:
            pending.finish()
    returned = out.local >= 0
    assert torch.equal(out.local[returned], q.local[returned])
    assert returned.sum() == sum(queries.sent * q.heads for queries in prepared.q)
    passed_on = any(kv.second.sent for kv in prepared.kv)
    return any(queries.received for queries in prepared.q), passed_on


@pytest.mark.usefixtures("eager_multicasts")
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_arrive_and_return(kv_heads: int, at_once: bool) -> None:
    plan = pool_plan(kv_heads)
    with hops_posted(at_once):
        outcomes = threaded_ranks(4, rows_arrive, plan, exchange_model.exchange(plan))
    received, passed_on = zip(*outcomes, strict=True)
    assert not received[0] and all(received[1:])
    assert any(passed_on)


def test_without_multicast_all_rows_come_from_their_holders() -> None:
    plan = pool_plan(per_node=8)
    outcomes = threaded_ranks(4, rows_arrive, plan, exchange_model.exchange(plan))
    assert [passed_on for _, passed_on in outcomes] == [False] * 4
