"""Ulysses as a placement: every worker of a CP group computes some heads of the whole pack.

The all-to-alls of Ulysses then follow from one more plan, so the baseline and Libra share kernels,
exchanges and autograd.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from libra.config import HeadShape
from libra.plan.pool_plan import PoolPlan


def check_ulysses(heads: HeadShape, cp_size: int) -> None:
    """Raise ValueError where query heads don't divide over the CP group.  Fewer key/value heads
    than ranks are allowed: each is sent to several ranks.
    """
    if heads.q % cp_size:
        raise ValueError(
            f"Ulysses needs query heads that divide by CP: got {heads.q} query heads ({heads.kv} "
            f"key/value) at CP {cp_size}; "
            "choose another CP, or a Libra placement, which has no such limit"
        )


def place_ulysses(uncut: PoolPlan) -> PoolPlan:
    """The plan with the worker of each tile: head shard c of a pack goes to rank c of its CP
    group.
    """
    cp_size, home = uncut.cp_size, uncut.geometry.block_worker
    tiles = (home // cp_size * cp_size)[:, None] + np.arange(cp_size)
    return replace(uncut, assignment=tiles.ravel().astype(np.int32))
