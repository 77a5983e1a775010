"""From a window's packs to its pools in the order of emission: one function for sampler, simulator
and benchmark, so that all three deal alike.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.data.refinement import PoolOrder, order_pools, refine_pools
from libra.data.vrsp import contiguous_pools, place_packs

IntArray = NDArray[np.int64]
PackPlacement = Literal["vrsp", "contiguous"]


def deal_pools(
    workloads: ArrayLike,
    pool_size: int,
    pools_per_index: int,
    *,
    placement: PackPlacement = "vrsp",
    refine: bool = True,
    order: PoolOrder = "grouped",
) -> IntArray:
    """Packs of every pool, int64 [K, P], of which `pools_per_index` (DP / P) rows in turn share a
    gradient-accumulation index.

    `contiguous` leaves packs and pools in their order; `refine` and `order` belong to `vrsp`.
    Raises ValueError as `place_packs`, `refine_pools` and `order_pools` do.
    """
    if placement == "contiguous":
        return contiguous_pools(len(np.asarray(workloads)), pool_size)
    pools = place_packs(workloads, pool_size)
    if refine:
        pools = refine_pools(workloads, pools)
    return order_pools(workloads, pools, pools_per_index, order)


def scheme_pools(
    scheme: str, workloads: ArrayLike, pool_size: int, pools_per_index: int
) -> IntArray:
    """Pools of a scheme that is compared with Libra: `libra` deals as the sampler does, `tap_vrsp`
    by plain VRSP, all others in sampler order.
    """
    return deal_pools(
        workloads,
        pool_size,
        pools_per_index,
        placement="vrsp" if scheme in ("libra", "tap_vrsp") else "contiguous",
        refine=scheme == "libra",
        order="grouped" if scheme == "libra" else "index",
    )
