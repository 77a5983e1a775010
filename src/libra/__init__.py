"""Libra: every GPU equally busy in the attention of long-context training.

Public names are resolved on first use, so that planning and `import libra` itself need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from libra.extras import check_installed

if TYPE_CHECKING:
    from libra.config import HeadShape, PoolConfig
    from libra.data.cp_shards import local_labels, local_positions
    from libra.data.packing import Packs, pack_best_fit, pack_sequential
    from libra.data.pools import order_pools, place_packs, refine_pools
    from libra.data.sampler import PoolSampler
    from libra.plan.plan_pool import PoolPlan, plan_pool
    from libra.runtime.attention import libra_attention
    from libra.runtime.microbatch import Microbatch
    from libra.runtime.pool import SequencePool

_MODULES = {
    "config": ("HeadShape", "PoolConfig"),
    "data.cp_shards": ("local_labels", "local_positions"),
    "data.packing": ("Packs", "pack_best_fit", "pack_sequential"),
    "data.pools": ("order_pools", "place_packs", "refine_pools"),
    "data.sampler": ("PoolSampler",),
    "plan.plan_pool": ("PoolPlan", "plan_pool"),
    "runtime.attention": ("libra_attention",),
    "runtime.microbatch": ("Microbatch",),
    "runtime.pool": ("SequencePool",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "HeadShape",
    "Microbatch",
    "Packs",
    "PoolConfig",
    "PoolPlan",
    "PoolSampler",
    "SequencePool",
    "libra_attention",
    "local_labels",
    "local_positions",
    "order_pools",
    "pack_best_fit",
    "pack_sequential",
    "place_packs",
    "plan_pool",
    "refine_pools",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'libra' has no attribute {name!r}")
    if _HOME[name].startswith("runtime"):
        check_installed("torch", f"libra.{name}")
    value = getattr(importlib.import_module(f"libra.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
