"""From a device mesh to the ranks of this rank's pool, and the pool's process groups.

mesh (pp, dp, cp) = (2, 4, 2), pool_size 2: each pool has 2 replicas of 2 CP ranks

pp 0:  dp 0 | dp 1     -> pool of ranks  0  1  2  3
       dp 2 | dp 3     -> pool of ranks  4  5  6  7
pp 1:  the same again  -> pools of ranks 8 .. 11 and 12 .. 15
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from libra.runtime.consensus import reach_consensus_at_store
from libra.runtime.torch_private import default_timeout, group_count


@dataclass(frozen=True, slots=True)
class Membership:
    """The pools of a mesh, and this rank's place in them."""

    pools: tuple[tuple[int, ...], ...]
    """Global ranks of every pool in worker order (replica-major, CP-minor); equal on all ranks."""
    pool: int
    """Index of this rank's pool."""
    worker: int
    """Index of this rank in its pool."""
    cp_size: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pool, in worker order."""
        return self.pools[self.pool]

    @property
    def replica(self) -> int:
        """Index of this rank's pack among the packs of its pool."""
        return self.worker // self.cp_size


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one pool, with the same members in the same order.

    There are three, because operations on one group must be issued in one order: tensors, the
    consensus of each call, and the planner thread.
    """

    exchange: dist.ProcessGroup
    consensus: dist.ProcessGroup
    planner: dist.ProcessGroup


def find_membership(
    mesh: DeviceMesh, pool_size: int, dp: str | Sequence[str], cp: str
) -> Membership:
    """This rank's pool in `mesh`: P contiguous replicas along the `dp` dimensions, with all their
    `cp` ranks.

    In other dimensions (pipeline, tensor, expert) a pool has one coordinate, so that each
    coordinate has pools of its own.  Raises ValueError for unknown dimensions or a data-parallel
    size that P does not divide.
    """
    names = mesh.mesh_dim_names or ()
    dp_names = (dp,) if isinstance(dp, str) else tuple(dp)
    missing = [name for name in dp_names if name not in names]
    if missing:
        raise ValueError(
            f"the mesh has dimensions {tuple(names)}, not {missing}; name its data-parallel "
            "dimensions with dp=..."
        )
    if mesh.get_coordinate() is None:
        raise ValueError("this rank is outside the mesh; make the pool on the mesh's ranks only")
    # Move the dp dimensions, then cp, to the end: the ranks of each pool then are neighbours.
    # Example: dims (dp, tp, cp) of sizes 4, 2, 2 become (tp, dp, cp), and pools of 2 replicas are
    # rows of 2 * 2 ranks: [0 1 4 5] [8 9 12 13] of tp 0, [2 3 6 7] [10 11 14 15] of tp 1.
    pooled = [names.index(name) for name in dp_names] + ([names.index(cp)] if cp in names else [])
    others = [axis for axis in range(len(names)) if axis not in pooled]
    grid = mesh.mesh.cpu().numpy().transpose(others + pooled)
    cp_size = grid.shape[-1] if cp in names else 1
    dp_size = math.prod(mesh.mesh.shape[names.index(name)] for name in dp_names)
    if dp_size % pool_size:
        raise ValueError(
            f"pool_size {pool_size} does not divide the data-parallel size {dp_size} "
            f"(mesh dimensions {dp_names}); choose PoolConfig.pool_size that does"
        )
    pools = grid.reshape(-1, pool_size * cp_size)
    # [[0 1 4 5] [8 9 12 13] ...] has rank 4 at (0, 2): pool 0, worker 2.
    ((pool, worker),) = np.argwhere(pools == dist.get_rank()).tolist()
    return Membership(tuple(map(tuple, pools.tolist())), pool, worker, cp_size)


def make_groups(
    membership: Membership, device_type: str, timeout: timedelta | None = None
) -> Groups:
    """Process groups of this rank's pool.

    Where the mesh spans the job, all ranks make all groups in one order, as torch requires.  For a
    smaller mesh (of one pipeline stage, say) the members alone make theirs, which torch gets right
    only if they have made equally many groups before.  Raises RuntimeError if they have not.
    """
    timeout = default_timeout(device_type) if timeout is None else timeout
    alone = sum(map(len, membership.pools)) < dist.get_world_size()
    if alone:
        _check_equal_history(membership.ranks)
    # All ranks make the groups of all pools; members alone make theirs without the others.
    pools = (membership.ranks,) if alone else membership.pools

    def group(backend: str | None) -> dist.ProcessGroup:
        groups = {
            ranks: dist.new_group([*ranks], timeout, backend, use_local_synchronization=alone)
            for ranks in pools
        }
        mine = groups[membership.ranks]
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    transport = "gloo" if device_type == "cpu" else None
    return Groups(exchange=group(transport), consensus=group("gloo"), planner=group("gloo"))


def _check_equal_history(ranks: Sequence[int]) -> None:
    """Raise RuntimeError on every member if they have made different numbers of groups so far."""
    try:
        reach_consensus_at_store(ranks, {"groups": group_count()})
    except ValueError as error:
        raise RuntimeError(
            "the ranks of this pool have made different numbers of process groups so far: "
            f"{error}; give SequencePool the mesh of the whole job, or make its pools before other "
            "groups"
        ) from error
