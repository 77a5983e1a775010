"""A rank plan prepared for a device says the same as the rank plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from libra.plan.attention_calls import LOCAL
from libra.plan.rank_plan import make_rank_plan
from libra.runtime.device_plan import hop_blocks, make_device_plan
from tests.unit.runtime.exchange_cases import CPU, NoKernel, pool_plan

pytestmark = pytest.mark.usefixtures("eager_multicasts")


@pytest.mark.parametrize("worker", range(4))
def test_permutations_are_inverses_of_each_other(worker: int) -> None:
    rank_plan = make_rank_plan(pool_plan(), worker)
    prepared = make_device_plan(rank_plan, pool_plan().heads, NoKernel(), CPU)
    for device, planned in zip(prepared.kv, rank_plan.kv_buffers, strict=True):
        assert (device.landed_of_buffer is None) == (planned.permutation is None)
        if device.landed_of_buffer is not None and device.buffer_of_landed is not None:
            both = device.landed_of_buffer[device.buffer_of_landed]
            assert both.tolist() == list(range(planned.rows))


@pytest.mark.parametrize("worker", range(4))
def test_calls_run_once_and_share_one_lse(worker: int) -> None:
    rank_plan = make_rank_plan(pool_plan(), worker)
    prepared = make_device_plan(rank_plan, pool_plan().heads, NoKernel(), CPU)
    calls = [call for chunk in (LOCAL, 0, 1) for call in prepared.calls[chunk]]
    assert {id(call.prepared) for call in calls} == {id(call) for call in rank_plan.calls}
    assert all(
        call.prepared.chunk == chunk for chunk in (LOCAL, 0, 1) for call in prepared.calls[chunk]
    )
    covered = np.concatenate([np.arange(call.lse.start, call.lse.stop) for call in calls])
    assert sorted(covered.tolist()) == list(range(prepared.lse_size))


def test_splits_and_ranges_are_those_of_the_plan() -> None:
    rank_plan = make_rank_plan(pool_plan(), 0)
    prepared = make_device_plan(rank_plan, pool_plan().heads, NoKernel(), CPU)
    for device, planned in zip(prepared.q, rank_plan.q, strict=True):
        assert device.send_index.tolist() == planned.send_index.tolist()
        assert device.send_splits == planned.send_splits.tolist()
        counts = [count for count in device.send_splits if count]
        assert [stop - start for start, stop in device.destinations] == counts


def test_gradients_of_a_buffer_return_after_its_last_reader() -> None:
    plan = pool_plan(kv_heads=4)  # every chunk has rows of its own
    every = make_device_plan(make_rank_plan(plan, 1), plan.heads, NoKernel(), CPU)
    assert every.kv_returns == ((0,), (1,))
    plan = pool_plan(kv_heads=1)  # both chunks read the rows of the first
    shared = make_device_plan(make_rank_plan(plan, 1), plan.heads, NoKernel(), CPU)
    assert shared.kv_returns == ((), (0,))


def test_only_a_thread_without_a_second_stream_blocks_between_hops() -> None:
    second = make_rank_plan(pool_plan(), 0).kv_multicast[0]
    stream: Any = object()
    assert second.moves
    assert hop_blocks(second, None) and not hop_blocks(second, stream)


def test_a_worker_that_computes_nothing_for_others_returns_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = pool_plan(per_node=8)
    idle = [
        make_device_plan(make_rank_plan(plan, worker), plan.heads, NoKernel(), CPU).idle_forward
        for worker in range(4)
    ]
    assert idle == [2, 0, 0, 0]


def test_padding_without_rows_is_none() -> None:
    plan = pool_plan()
    assert make_device_plan(make_rank_plan(plan, 0), plan.heads, NoKernel(), CPU).padding is None


def test_operands_lie_one_behind_the_other() -> None:
    plan = pool_plan()
    prepared = make_device_plan(make_rank_plan(plan, 1), plan.heads, NoKernel(), CPU)
    memory = prepared.memory
    q, k, v, out = prepared.operands(
        [torch.zeros(32, heads, 1) for heads in (4, 2, 2, 4)],
        torch.arange(memory.fetched_q),
        torch.arange(memory.fetched_kv),
        torch.arange(memory.peer_out),
    )
    assert q[LOCAL].shape == (32, 4, 1) and q.rows(LOCAL).shape == (32 * 4 // q.heads, q.heads)
    assert torch.cat([q[chunk].flatten() for chunk in range(2)]).tolist() == q.flat.tolist()
    assert torch.cat([out[chunk].flatten() for chunk in range(2)]).tolist() == out.flat.tolist()
    assert torch.cat([k.flat, v.flat]).tolist() == list(range(memory.fetched_kv))
