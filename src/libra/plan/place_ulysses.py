"""Ulysses as a placement: every worker of a CP group computes its share of the heads for the whole
pack.

The all-to-all that Ulysses needs is then one more exchange plan, so baseline and Libra share
kernel, transport and autograd.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape
from libra.plan.geometry import Geometry


def check_ulysses(heads: HeadShape, cp_size: int) -> None:
    """Raise ValueError where heads don't divide over the CP group; key/value heads below CP are
    replicated.
    """
    if heads.q % cp_size:
        raise ValueError(
            f"Ulysses needs query heads that divide by CP: got {heads.q} query heads ({heads.kv} "
            f"key/value) at CP {cp_size}; "
            "choose another CP, or a Libra placement, which has no such limit"
        )


def place_ulysses(geometry: Geometry) -> NDArray[np.int32]:
    """Worker of each tile, int32 [blocks * CP]: head shard c of a pack goes to rank c of its CP
    group.
    """
    group = geometry.block_worker // geometry.cp_size * geometry.cp_size
    return (group[:, None] + np.arange(geometry.cp_size)).ravel().astype(np.int32)
