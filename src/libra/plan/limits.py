"""How much a worker may send, receive and hold, and whether a plan keeps to it.

The unit is what every worker has anyway: the bytes of its own q, k, v and out.  The backward pass
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


def within_limits(plan: PoolPlan) -> bool:
    """Whether every worker of a plan keeps to the limits of its configuration."""
    from libra.plan.tally import pool_tally

    rows = int(plan.geometry.rows.max())
    sent, received, held = byte_limits(plan.config, plan.heads, rows)
    moved = plan.traffic.sum(axis=0)
    return bool(
        moved.sum(axis=1).max() <= sent
        and moved.sum(axis=0).max() <= received
        and pool_tally(plan).extra_memory.max() <= held
    )
