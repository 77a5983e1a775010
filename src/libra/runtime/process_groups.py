"""Who is in a pool: from a device mesh to the ranks of this rank's pool, and their process
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Membership:
    """The pools of a mesh, ranks in worker order (replica-major, CP-minor), and this rank's
    place.
    """

    pools: tuple[tuple[int, ...], ...]
    """Global ranks of every pool of the mesh, in one order on all ranks."""
    pool: int
    """This rank's pool among them."""
    worker: int
    """This rank in its pool."""
    cp_size: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pool, in worker order."""
        return self.pools[self.pool]


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
    if mesh.get_coordinate() is None:
        raise ValueError("this rank is outside the mesh; make the pool on the mesh's ranks only")
    wanted = [names.index(name) for name in dp_names] + ([names.index(cp)] if cp in names else [])
    others = [axis for axis in range(len(names)) if axis not in wanted]
    grid = mesh.mesh.cpu().numpy().transpose(others + wanted)
    cp_size = grid.shape[-1] if cp in names else 1
    dp_size = int(np.prod([mesh.mesh.shape[names.index(name)] for name in dp_names]))
    if dp_size % pool_size:
        raise ValueError(
            f"pool_size {pool_size} does not divide the data-parallel size {dp_size} "
            f"(mesh dimensions {dp_names}); choose PoolConfig.pool_size that does"
        )
    pools = grid.reshape(-1, pool_size * cp_size)
    ((pool, worker),) = np.argwhere(pools == dist.get_rank()).tolist()
    return Membership(
        pools=tuple(tuple(ranks) for ranks in pools.tolist()),
        pool=pool,
        worker=worker,
        cp_size=cp_size,
    )


def make_groups(
    membership: Membership, device_type: str, timeout: timedelta | None = None
) -> Groups:
    """Process groups of this rank's pool.

    Where the mesh spans the job, all ranks make all groups in one order, as torch wants it.  A
    smaller mesh (one pipeline stage's, say) can't ask that of ranks outside: there only the members
    take part, which torch gets right only if they have made equally many groups before.  Raises
    RuntimeError where they haven't.
    """
    if timeout is None:
        timeout = _job_timeout(device_type)
    everyone = sum(map(len, membership.pools)) == dist.get_world_size()
    if not everyone:
        _check_equal_history(membership.ranks)

    def group(backend: str | None) -> dist.ProcessGroup:
        if not everyone:
            return _made(
                dist.new_group(
                    list(membership.ranks),
                    timeout=timeout,
                    backend=backend,
                    use_local_synchronization=True,
                )
            )
        groups = [
            dist.new_group(list(ranks), timeout=timeout, backend=backend)
            for ranks in membership.pools
        ]
        return _made(groups[membership.pool])

    return Groups(
        exchange=group("gloo" if device_type == "cpu" else None),
        agreement=group("gloo"),
        planner=group("gloo"),
    )


def _job_timeout(device_type: str) -> timedelta | None:
    """The timeout that the job gave its default group, which new groups don't take over."""
    world = dist.group.WORLD
    if world is None:
        return None
    try:
        backend = world._get_backend(torch.device(device_type))
    except RuntimeError:  # the default group has no backend for this device
        return None
    options = getattr(backend, "options", None)  # thread-based test groups have none
    return getattr(options, "_timeout", None)


def _made(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def _check_equal_history(ranks: Sequence[int]) -> None:
    """Raise RuntimeError on every member if they have made different numbers of groups so far."""
    store = dist.distributed_c10d._get_default_store()
    count = len(dist.distributed_c10d._world.pg_names)
    place = f"libra/groups/{'-'.join(map(str, ranks))}"
    turn = store.add(f"{place}/rounds/{dist.get_rank()}", 1)  # a pool may be made twice
    store.set(f"{place}/{turn}/{dist.get_rank()}", str(count))
    counts = {rank: int(store.get(f"{place}/{turn}/{rank}")) for rank in ranks}
    if len(set(counts.values())) > 1:
        raise RuntimeError(
            "the ranks of this pool have made different numbers of process groups so far: "
            f"{counts}; "
            "give SequencePool the mesh of the whole job, or make its pools before other groups"
        )
