"""Libra: every GPU equally busy in the attention of long-context training.

Public names are resolved on first use, so that planning and `import libra` itself need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libra.config import HeadShape, PoolConfig
    from libra.packing import Packs, pack_best_fit, pack_sequential
    from libra.placement import place_packs
    from libra.plan.plan import PoolPlan, plan_pool
    from libra.refinement import order_pools, refine_pools
    from libra.runtime.attention import libra_attention
    from libra.runtime.layout import Layout
    from libra.runtime.pool import SequencePool
    from libra.sampler import PoolSampler
    from libra.shards import local_labels, local_positions

_HOME = {
    "HeadShape": "config",
    "Layout": "runtime.layout",
    "Packs": "packing",
    "PoolConfig": "config",
    "PoolPlan": "plan.plan",
    "PoolSampler": "sampler",
    "SequencePool": "runtime.pool",
    "libra_attention": "runtime.attention",
    "local_labels": "shards",
    "local_positions": "shards",
    "order_pools": "refinement",
    "pack_best_fit": "packing",
    "pack_sequential": "packing",
    "place_packs": "placement",
    "plan_pool": "plan.plan",
    "refine_pools": "refinement",
}

__all__ = [
    "HeadShape",
    "Layout",
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
    value = getattr(importlib.import_module(f"libra.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
