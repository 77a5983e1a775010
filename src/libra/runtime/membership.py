"""Who is in a pool: from a device mesh to the ranks of this rank's pool, and their process
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Membership:
    """A pool's global ranks in worker order (replica-major, CP-minor), and this rank among them."""

    ranks: tuple[int, ...]
    worker: int
    cp_size: int


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one pool, the same members in the same order.

    Three, because operations on one group must be issued in one order: tensors, per-call agreement,
    and the planner thread.
    """

    exchange: dist.ProcessGroup
    agreement: dist.ProcessGroup
    planner: dist.ProcessGroup


def find_membership(
    mesh: DeviceMesh, pool_size: int, dp: str | Sequence[str], cp: str
) -> Membership:
    """This rank's pool in `mesh`: P contiguous replicas along the `dp` dimensions, with all their
    `cp` ranks.

    Other dimensions (pipeline, tensor, expert) keep this rank's coordinate, so that each makes
    pools of its own. Raises ValueError for unknown dimensions or a data-parallel size that P
    doesn't divide.
    """
    names = mesh.mesh_dim_names or ()
    dp_names = (dp,) if isinstance(dp, str) else tuple(dp)
    missing = [name for name in dp_names if name not in names]
    if missing:
        raise ValueError(
            f"the mesh has dimensions {tuple(names)}, not {missing}; name its data-parallel "
            "dimensions with dp=..."
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is outside the mesh; make the pool on the mesh's ranks only")
    wanted = [names.index(name) for name in dp_names] + ([names.index(cp)] if cp in names else [])
    others = [axis for axis in range(len(names)) if axis not in wanted]
    grid = mesh.mesh.cpu().numpy().transpose(others + wanted)
    grid = grid[tuple(coordinate[axis] for axis in others)]
    cp_size = grid.shape[-1] if cp in names else 1
    grid = grid.reshape(-1, cp_size)  # [DP, CP]
    if len(grid) % pool_size:
        raise ValueError(
            f"pool_size {pool_size} does not divide the data-parallel size {len(grid)} "
            f"(mesh dimensions {dp_names}); choose PoolConfig.pool_size that does"
        )
    replica, _ = np.argwhere(grid == dist.get_rank())[0]
    first = int(replica) // pool_size * pool_size
    ranks = tuple(int(rank) for rank in grid[first : first + pool_size].ravel())
    return Membership(ranks=ranks, worker=ranks.index(dist.get_rank()), cp_size=cp_size)


def make_groups(
    membership: Membership, device_type: str, timeout: timedelta | None = None
) -> Groups:
    """Process groups of the pool; only its members take part, so pools of other stages need not
    wait.
    """

    def group(backend: str | None) -> dist.ProcessGroup:
        made = dist.new_group(
            list(membership.ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
        )
        assert isinstance(made, dist.ProcessGroup)
        return made

    return Groups(
        exchange=group("gloo" if device_type == "cpu" else None),
        agreement=group("gloo"),
        planner=group("gloo"),
    )
