"""A lower bound for the traffic of a pool: the least number of bytes that balance costs.

Take any placement with no load above C = (1 + tolerance) * mean.  If the home load of a pack
exceeds CP * C, workers of other packs must compute the rest, and they hold none of its K and V.
Say one of them computes d pairs-times-heads of one sample and one key/value head, which g query
heads share.  For a prefix of b rows it receives b rows of K and V.  A query row and head then gives
at most b pairs, so it receives at least d / b rows of Q and returns as many of O.  If a row costs k
(K and V) and q (Q and O), the sum is

    k b + q d / b  >=  2 sqrt(k q d)            for b = sqrt(q d / k), or the sample's length where
                                                that is less.

This is a concave function of d, so one pair costs least for the largest d: the smaller of C and the
whole head.

Where the surplus lies inside CP groups another bound is nearer.  Other workers must compute the
work that a worker holds above C, at best its latest rows, which give the most pairs.  Besides these
rows of Q and O travel the K and V that the work of other packs needs at least, 2 d / (g * longest
sample) rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from libra.data.lengths import causal_pairs
from libra.plan.pool_plan import PoolPlan


def traffic_bound(plan: PoolPlan) -> int:
    """Forward bytes that every placement within the plan's tolerance moves at least.

    K and V that CP groups exchange among themselves count nothing, so the bound is loose where
    samples span shards at home.
    """
    heads, geometry = plan.heads, plan.geometry
    ceiling = (1 + plan.config.tolerance) * plan.home_load.sum() / plan.workers
    lengths = geometry.sample_stop - geometry.sample_start
    pack_of = geometry.sample_start // geometry.tokens
    # The first bound, and the K and V rows of the second, summed over packs with a surplus.
    joint, keys = 0.0, 0.0
    for pack in range(geometry.packs):
        load = int(plan.home_load[pack * plan.cp_size : (pack + 1) * plan.cp_size].sum())
        surplus = load - plan.cp_size * ceiling
        if surplus <= 0:
            continue
        longest = int(lengths[pack_of == pack].max())
        most = min(ceiling, heads.group * longest * (longest + 1) / 2)
        prefix = min(math.sqrt(most), longest)
        joint += surplus * (prefix + most / prefix) / most
        keys += surplus * 2 / (heads.group * (longest + 1))
    # The second bound's rows of Q and O.
    queries = sum(
        _latest_rows(plan, worker, load - ceiling)
        for worker, load in enumerate(plan.home_load.tolist())
        if load > ceiling
    )
    # A row of one head is as wide in K with V as in Q with O.
    return int(max(joint, queries * heads.q + keys) * heads.kv_bytes(1))


def _latest_rows(plan: PoolPlan, worker: int, surplus: float) -> int:
    """Fewest rows of a worker whose pairs, over all heads, reach `surplus`."""
    geometry, pieces = plan.geometry, plan.geometry.sample_shards
    mine = geometry.fragment_worker[pieces.right] == worker
    origin = geometry.sample_start[pieces.left[mine]]
    low, high = pieces.start[mine] - origin, pieces.stop[mine] - origin

    def too_few(row: int) -> bool:
        """Whether the rows from `row` on are too few."""
        return bool(causal_pairs(np.clip(row, low, high), high).sum() * plan.heads.q < surplus)

    above = bisect_left(range(int(high.max())), True, lo=1, key=too_few)
    return int((high - np.clip(above, low, high)).sum())
