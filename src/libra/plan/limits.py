"""How much a worker may send, receive and hold for work that is computed away from home.

The unit is what every worker has anyway: the bytes of its own q, k, v and out.  K and V that a
worker needs for rows of its own are not counted: no placement spares it those.  The backward pass
sends what the forward pass received, gradient for tensor, so one limit for both directions holds
for both passes (`refetch` moves the forward's bytes once more).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.pool_plan import PoolPlan

IntArray = NDArray[np.int64]

_NO_LIMIT: Final = 2**62


def own_bytes(rows: int, heads: HeadShape) -> int:
    """Bytes of q, k, v and out of a worker that holds `rows` rows."""
    return rows * (heads.q + heads.kv) * (heads.dim + heads.value_dim) * heads.bytes


def byte_limits(config: PoolConfig, heads: HeadShape, rows: int) -> IntArray:
    """Most bytes that a worker sends, receives and holds for others, int64 [3]."""
    traffic, memory = (
        _NO_LIMIT if math.isinf(factor) else min(_NO_LIMIT, int(factor * own_bytes(rows, heads)))
        for factor in (config.traffic_limit, config.memory_limit)
    )
    return np.array([traffic, traffic, memory], dtype=np.int64)


def keeps_limits(plan: PoolPlan, beside: PoolPlan) -> bool:
    """Whether no worker of `plan` sends, receives or holds more than a limit allows, or than the
    busiest of a plan `beside` it that keeps the limits.
    """
    from libra.plan.traffic import held_for_others

    limits = byte_limits(plan.config, plan.heads, int(plan.geometry.rows.max()))

    def most(of: PoolPlan) -> IntArray:
        moved = of.traffic.sum(axis=0)
        held = held_for_others(of).max()
        return np.array([moved.sum(axis=1).max(), moved.sum(axis=0).max(), held])

    return bool((most(plan) <= np.maximum(limits, most(beside))).all())
