"""Torch's private names are where this version of torch has them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from libra.runtime.torch_private import (
    cpu_flash_attention,
    default_store,
    default_timeout,
    group_count,
    has_fast_products,
    stage,
)


def test_the_default_group_tells_its_timeout_and_store() -> None:
    assert not dist.is_initialized()
    assert default_timeout("cpu") is None
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=8)
    )
    try:
        assert default_timeout("cpu") == timedelta(seconds=8)
        assert group_count() == 1
        dist.new_group([0])
        assert group_count() == 2
        default_store().set("key", "value")
        assert default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_a_stage_is_recorded_only_while_a_profiler_runs() -> None:
    assert stage("attend") is stage("return")
    with profile(activities=[ProfilerActivity.CPU]) as seen, stage("attend"):
        pass
    assert [event.key for event in seen.key_averages()] == ["libra::attend"]


def test_the_operator_attends_and_tells_the_log_sum_exp() -> None:
    ones = torch.ones(1, 2, 4, 8)
    out, lse = cpu_flash_attention(ones, ones, ones, 0.0, False, scale=1.0)
    assert torch.equal(out, ones)
    torch.testing.assert_close(lse, torch.full((1, 2, 4), 8 + torch.tensor(4.0).log().item()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_processor_knows_its_fast_products(dtype: torch.dtype) -> None:
    assert has_fast_products(dtype) in (True, False)
