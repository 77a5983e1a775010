"""A cluster-wide attention pool, in the manner of DistCA: all replicas share one pool.

The same tiles, transport and kernels as Libra, so it is a configuration: P = DP and packs in the
sampler's order, since one pool holds every pack of a step and placing packs would change nothing
that balances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from libra.config import PoolConfig
from libra.data.packing import Packs

if TYPE_CHECKING:
    from libra.data.sampler import PoolSampler


def cluster_config(config: PoolConfig, dp_size: int) -> PoolConfig:
    """`config` for a pool of all replicas."""
    return config.replace(pool_size=dp_size)


def cluster_sampler(
    lengths_of_packs: Packs | Sequence[ArrayLike],
    *,
    global_batch: int,
    dp_rank: int,
    dp_size: int,
    shuffle: bool = True,
    seed: int = 0,
) -> PoolSampler:
    """Packs in plain order, the same windows as any `PoolSampler` of this seed."""
    from libra.data.sampler import PoolSampler  # torch: loaded by those who need it

    return PoolSampler(
        lengths_of_packs,
        global_batch=global_batch,
        dp_rank=dp_rank,
        dp_size=dp_size,
        pool_size=dp_size,
        shuffle=shuffle,
        seed=seed,
        placement="contiguous",
    )
