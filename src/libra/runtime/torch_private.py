"""All of torch's private names that Libra uses: profiler stages, the job's groups, CPU operators.

Torch may change such names in any release: then only this file has to follow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.profiler import record_function

_NO_PROFILER: Final = nullcontext()

cpu_flash_attention: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward: Final = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)


def stage(name: str) -> AbstractContextManager[object]:
    """A profiler range `libra::{name}`.  Free while no profiler runs; a range costs 20 us then."""
    # torch's own optimizers read the same flag; without the flag every stage is recorded.
    enabled = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(f"libra::{name}") if enabled else _NO_PROFILER


def default_store() -> dist.distributed_c10d.Store:
    """The key-value store with which the job's processes found each other."""
    return dist.distributed_c10d._get_default_store()


def group_count() -> int:
    """Number of process groups that this rank has made so far and not destroyed."""
    # torch names a group by this count, so ranks have to agree on it.
    return len(dist.distributed_c10d._world.pg_names)


def default_timeout(device_type: str) -> timedelta | None:
    """Timeout of the job's default group, which torch does not pass on to new groups."""
    if dist.group.WORLD is None:
        return None
    try:
        backend = dist.group.WORLD._get_backend(torch.device(device_type))
    except RuntimeError:  # the default group has no backend for this device
        return None
    # Groups of threads, as in tests, have no options.
    return getattr(getattr(backend, "options", None), "_timeout", None)


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies bf16 or fp16 without widening them first."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
