"""Figures of a caller's own, in a module that other processes import quickly."""

from __future__ import annotations

import numpy as np

from libra.plan.pool_plan import PoolPlan


def busy_workers(plan: PoolPlan) -> dict[str, float]:
    """Workers that have anything to do."""
    return {"busy_workers": float(np.count_nonzero(plan.load))}


def takes_a_name(plan: PoolPlan) -> dict[str, float]:
    """A figure under a name that is taken."""
    return {"load": float(plan.load.sum())}
