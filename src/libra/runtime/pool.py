"""A sequence pool on this rank: its process groups, made once, and its microbatches."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from libra.config import HeadShape, PoolConfig
from libra.data.lengths import IntArray, check_cu_seqlens
from libra.runtime.consensus import gather, reach_consensus_at_store
from libra.runtime.failure import naming_lost_ranks
from libra.runtime.kernels.interface import Kernel
from libra.runtime.microbatch import Microbatch, PoolRuntime
from libra.runtime.process_groups import Groups, Membership, find_membership, make_groups

logger = logging.getLogger(__name__)


class SequencePool:
    """P data-parallel replicas, with all their context-parallel ranks, that share their attention.

    `mesh` may have any dimensions; `dp` names its data-parallel dimension (or several, as in hybrid
    sharding), `cp` its context-parallel dimension, which may be missing.  Every coordinate of the
    other dimensions has pools of its own.  Collective over the mesh.

    `heads` lets planning start before the first attention call, which otherwise gives the head
    shape.  `kernel` names a FlashAttention build instead of the best available, or is a kernel.
    `timeout` is that of the pool's process groups, by default the job's.  `groups` reuses the
    groups of a closed pool with the same members (torch never frees a group's name, so pools do not
    destroy their groups).  At most `live_microbatches` microbatches may be between forward and
    backward.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        config: PoolConfig,
        *,
        heads: HeadShape | None = None,
        kernel: str | Kernel | None = None,
        dp: str | Sequence[str] = "dp",
        cp: str = "cp",
        timeout: timedelta | None = None,
        groups: Groups | None = None,
        live_microbatches: int = 64,
    ) -> None:
        # Step 1: compare settings, because ranks that disagree on a group's members cannot make it.
        reach_consensus_at_store(
            mesh.mesh.flatten().tolist(),
            {"configuration": config, "mesh": f"{mesh.mesh_dim_names} {tuple(mesh.mesh.shape)}"},
        )
        # Step 2: find this rank's pool, make its groups, and start the planner thread.
        membership = find_membership(mesh, config.pool_size, dp, cp)
        self.config: Final[PoolConfig] = config
        """The configuration, equal on all ranks."""
        self.membership: Final[Membership] = membership
        """The ranks of this pool, and this rank's place among them."""
        self.groups: Final[Groups] = groups or make_groups(membership, mesh.device_type, timeout)
        """The process groups, which another pool of the same members may reuse after `close`."""
        known = [] if heads is None else [heads]
        self._runtime = PoolRuntime(config, membership, self.groups, kernel, known)
        self._live: deque[Microbatch] = deque(maxlen=live_microbatches)
        logger.info("made %r", self)

    def __repr__(self) -> str:
        m = self.membership
        return (
            f"SequencePool(ranks={list(m.ranks)}, worker={m.worker}, cp={m.cp_size}, {self.config})"
        )

    def microbatch(
        self, cu_seqlens: ArrayLike | Tensor, *, tokens: int | None = None
    ) -> Microbatch:
        """Begin the next microbatch, given the sample bounds of this rank's own pack.

        `cu_seqlens` [samples + 1] counts from 0; `tokens` is L where the pack ends in padding.
        Uses the plan that `prefetch` started for the same pack, else gathers the other ranks'
        bounds.  Collective over the pool; raises the same ValueError on every rank for lengths that
        do not fit or differ inside a CP group.
        """
        m, problem = self.membership, None
        own = np.zeros(1, dtype=np.int64)
        try:
            (own,) = _check_bounds([cu_seqlens], tokens)
        except ValueError as error:
            problem = str(error)
        length = int(own[-1]) if tokens is None else tokens
        facts = {"tokens": length, "configuration": self.config, "CP": m.cp_size}
        self._runtime.agree("microbatch", problem, facts)
        with naming_lost_ranks("microbatch", m.ranks):
            begun = self._take_prefetched(own, length)
            begun = begun or Microbatch(self._runtime, self._gather_bounds(own), length)
        self._live.append(begun)  # only now: any number may be planned ahead
        return begun

    def prefetch(
        self, cu_seqlens_per_pack: Sequence[ArrayLike | Tensor], *, tokens: int | None = None
    ) -> None:
        """Start planning a coming microbatch, given the bounds of all packs of the pool in replica
        order.

        Every rank of the pool makes the same calls in the same order, and `microbatch` later
        follows that order.  Waits for nothing.
        """
        bounds = _check_bounds(cu_seqlens_per_pack, tokens)
        if len(bounds) != self.config.pool_size:
            raise ValueError(
                f"prefetch got {len(bounds)} packs for a pool of pool_size={self.config.pool_size}"
            )
        length = int(bounds[0][-1]) if tokens is None else tokens
        self._runtime.prefetched.append(Microbatch(self._runtime, bounds, length))

    def close(self) -> None:
        """End the planner thread, after all submitted plans, and free the workspace.  The process
        groups stay.
        """
        self._runtime.planner.shutdown()
        self._runtime.workspace.release()

    def _take_prefetched(self, own: IntArray, length: int) -> Microbatch | None:
        """The prefetched microbatch of this pack, if all ranks have prefetched the same one; it and
        earlier ones leave the list.
        """
        prefetched, planner = self._runtime.prefetched, self._runtime.planner
        # Step 1: look for it, and tell the other ranks its place in the list, counted from 1.
        replica = self.membership.replica
        place, digest = 0, 0
        for index, each in enumerate(prefetched, start=1):
            if each.tokens == length and np.array_equal(each.cu_seqlens[replica], own):
                place, digest = index, each.digest
                break
        facts = self._gather([place, digest, planner.submitted], 3)
        # Step 2: if some rank prefetched other packs, or none, begin anew.
        if (facts != facts[0]).any():
            logger.warning(
                "ranks of the pool prefetched different microbatches: %d plans are dropped",
                len(prefetched),
            )
            planner.catch_up(int(facts[:, 2].max()))
            prefetched.clear()
            return None
        # Step 3: take it.
        begun = prefetched[place - 1] if place else None
        del prefetched[:place]
        return begun

    def _gather(self, values: Sequence[int] | IntArray, width: int) -> IntArray:
        """Every worker's integers, padded with zeros, int64 [workers, width]."""
        mine = torch.zeros(width, dtype=torch.int64)
        mine[: len(values)] = torch.as_tensor(values)
        return gather(self.groups.consensus, mine).numpy()

    def _gather_bounds(self, own: IntArray) -> list[IntArray]:
        """Sample bounds of every pack; ValueError if they differ inside a CP group."""
        # Packs differ in their number of samples: bounds [0, 8] and [0, 3, 8] travel as [0, 8, 0]
        # and [0, 3, 8], with counts 2 and 3.
        counts = self._gather([len(own)], 1)[:, 0]
        table = self._gather(own, int(counts.max()))
        bounds = [row[:count] for row, count in zip(table, counts, strict=True)]
        cp_size = self.membership.cp_size
        for other, cu in enumerate(bounds):
            first = other // cp_size * cp_size
            if not np.array_equal(cu, bounds[first]):
                raise ValueError(
                    f"workers {first} and {other} share one pack (CP {cp_size}) but gave different "
                    "cu_seqlens; every rank of a CP group passes the bounds of the whole pack"
                )
        return bounds[::cp_size]


def _check_bounds(every: Sequence[ArrayLike | Tensor], tokens: int | None) -> list[IntArray]:
    """A user's sample bounds as arrays; raises ValueError for wrong ones."""
    try:
        arrays = [cu.cpu().numpy() if isinstance(cu, Tensor) else cu for cu in every]
        return [check_cu_seqlens(cu, tokens=tokens) for cu in arrays]
    except TypeError as error:
        raise ValueError(str(error)) from error
