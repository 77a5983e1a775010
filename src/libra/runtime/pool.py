"""A sequence pool on this rank: its groups, made once, and the microbatches of its microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.distributed.device_mesh import DeviceMesh

from libra.config import HeadShape, PoolConfig
from libra.data.cp_shards import local_positions
from libra.data.lengths import check_cu_seqlens
from libra.runtime.consensus import reach_consensus, reach_consensus_at_store
from libra.runtime.failure import finish, naming_lost_ranks
from libra.runtime.kernels import kernel_for
from libra.runtime.kernels.interface import Kernel
from libra.runtime.microbatch import Microbatch
from libra.runtime.planner_thread import Planner
from libra.runtime.process_groups import Groups, find_membership, make_groups
from libra.runtime.speed import SpeedMeter
from libra.runtime.workspace import Workspace

IntArray = NDArray[np.int64]


class SequencePool:
    """P data-parallel replicas, with all their context-parallel ranks, that share their attention.

    `mesh` may have any dimensions; `dp` names its data-parallel one (or several, as in hybrid
    sharding), `cp` its context-parallel one, which may be missing.  Every other coordinate makes
    pools of its own.  Collective over the mesh.

    `heads` lets planning start before the first attention call; otherwise the first call tells.
    `kernel` names a FlashAttention build instead of the best one found, or is a kernel itself.
    `groups` takes over those of a closed pool with the same members (torch never frees a group's
    name, so pools don't destroy theirs).  `live_microbatches` microbatches may be between forward and
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
        self.config = config
        reach_consensus_at_store(
            mesh.mesh.flatten().tolist(),
            {"configuration": config, "mesh": f"{mesh.mesh_dim_names} {tuple(mesh.mesh.shape)}"},
        )
        self.membership = find_membership(mesh, config.pool_size, dp, cp)
        self.groups = groups or make_groups(self.membership, mesh.device_type, timeout)
        self._meter = SpeedMeter() if config.speeds == "measured" else None
        self.planner = Planner(
            self.groups.planner,
            self.membership.worker,
            self.membership.cp_size,
            config,
            self._meter,
        )
        self.workspace = Workspace()
        self.broken: str | None = None
        """Why no rank can go on with this pool, once a call ended midway on this one."""
        self._heads = [] if heads is None else [heads]
        self._kernel_chosen = kernel
        self._kernels: dict[torch.device, Kernel] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ahead: list[Microbatch] = []
        self._live: deque[Microbatch] = deque(maxlen=live_microbatches)

    def __repr__(self) -> str:
        m = self.membership
        return (
            f"SequencePool(ranks={list(m.ranks)}, worker={m.worker}, cp={m.cp_size}, {self.config})"
        )

    def microbatch(
        self, cu_seqlens: ArrayLike | torch.Tensor, *, tokens: int | None = None
    ) -> Microbatch:
        """The microbatch of the next microbatch, from the sample bounds of this rank's own pack.

        `cu_seqlens` [samples + 1] counts from 0; `tokens` is L where the pack ends in padding.
        Uses what `prefetch` planned for the same pack, else gathers the other ranks' bounds.
        Collective over the pool; raises the same ValueError on every rank for lengths that don't
        fit or differ inside a CP group.
        """
        bounds, problem = _checked([cu_seqlens], tokens)
        own = bounds[0] if bounds else np.zeros(1, dtype=np.int64)
        length = int(own[-1]) if tokens is None else tokens
        replica = self.membership.worker // self.membership.cp_size
        ahead = next(
            (
                microbatch
                for microbatch in self._ahead
                if microbatch.tokens == length
                and np.array_equal(microbatch.cu_seqlens[replica], own)
            ),
            None,
        )
        with naming_lost_ranks("microbatch", self.membership.ranks):
            facts = {"tokens": length, **self._settings()}
            reach_consensus(self.groups.agreement, "microbatch", self.broken or problem, facts)
            place, digest = 0, 0
            if ahead is not None:
                place, digest = self._ahead.index(ahead) + 1, ahead.digest
            told = self._gather([place, digest, self.planner.submitted], 3)
            if (told != told[0]).any():  # some rank prefetched other packs, or none: begin anew
                self.planner.catch_up(int(told[:, 2].max()))
                place = len(self._ahead)
                ahead = None
            del self._ahead[:place]
            begun = ahead or self._make(self._gather_bounds(own), length)
        self._live.append(begun)  # not before: any number may be planned ahead
        return begun

    def prefetch(
        self,
        cu_seqlens_per_pack: Sequence[ArrayLike | torch.Tensor],
        *,
        tokens: int | None = None,
    ) -> None:
        """Start planning a coming microbatch from the bounds of all packs of the pool, in replica
        order.

        Every rank of the pool makes the same calls in the same order, `microbatch` later follows that
        order.  Nothing waits.
        """
        bounds, problem = _checked(cu_seqlens_per_pack, tokens)
        if problem is None and len(bounds) != self.config.pool_size:
            problem = (
                f"prefetch got {len(bounds)} packs for a pool of pool_size={self.config.pool_size}"
            )
        if problem is not None:
            raise ValueError(problem)
        length = int(bounds[0][-1]) if tokens is None else tokens
        self._ahead.append(self._make(bounds, length))

    def close(self) -> None:
        """Let the planner thread end and the workspace go; every rank finishes what all were asked
        to plan.  The process groups stay.
        """
        self.planner.shutdown()
        self.workspace.release()

    def remember(self, heads: HeadShape) -> None:
        """Plan coming microbatches for this head shape too, those that were prefetched first, without
        waiting for their first attention call.
        """
        if heads not in self._heads:
            self._heads.append(heads)
            for microbatch in self._ahead:
                microbatch.start_planning(heads)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Surrounds the messages of a call.  One that raises leaves some under way: what they still
        write is let go, and later calls are refused on every rank, for the ranks are out of step.
        """
        try:
            yield
        except BaseException as error:
            self.workspace.release()
            self.broken = (
                f"an attention call ended midway ({type(error).__name__}: {error}) and left "
                "messages of this pool under way; make a new pool, with groups of its own"
            )
            raise

    def multicast_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream in which this pool's relays work, made once a device; None on a CPU."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def kernel(self, device: torch.device) -> Kernel:
        """The attention kernel for a device."""
        if device not in self._kernels:
            kernel = kernel_for(device, self._kernel_chosen)
            if self._meter is not None:
                kernel = self._meter.timed(kernel)
            self._kernels[device] = kernel
        return self._kernels[device]

    def _make(self, bounds: Sequence[IntArray], tokens: int) -> Microbatch:
        cp_size = self.membership.cp_size
        rows = local_positions(
            tokens, cp_size, self.membership.worker % cp_size, self.config.shard_layout
        )
        microbatch = Microbatch(self, bounds, tokens, len(rows))
        for heads in self._heads:
            microbatch.start_planning(heads)
        return microbatch

    def _settings(self) -> dict[str, object]:
        return {"configuration": self.config, "CP": self.membership.cp_size}

    def _gather(self, values: Sequence[int] | IntArray, width: int) -> IntArray:
        """Every worker's integers, int64 [workers, width]."""
        mine = torch.zeros(width, dtype=torch.int64)
        mine[: len(values)] = torch.as_tensor(values)
        every = [torch.empty_like(mine) for _ in self.membership.ranks]
        group = self.groups.agreement
        finish(dist.all_gather(every, mine, group=group, async_op=True), group)
        return torch.stack(every).numpy()

    def _gather_bounds(self, own: IntArray) -> list[IntArray]:
        counts = self._gather([len(own)], 1)[:, 0]
        table = self._gather(own, int(counts.max()))
        bounds = [row[:count] for row, count in zip(table, counts, strict=True)]
        cp_size = self.membership.cp_size
        for worker, cu in enumerate(bounds):
            first = worker // cp_size * cp_size
            if not np.array_equal(cu, bounds[first]):
                raise ValueError(
                    f"workers {first} and {worker} share one pack (CP {cp_size}) but gave "
                    "different cu_seqlens; "
                    "every rank of a CP group passes the bounds of the whole pack"
                )
        return bounds[::cp_size]


def _checked(
    every: Sequence[ArrayLike | torch.Tensor], tokens: int | None
) -> tuple[list[IntArray], str | None]:
    """Checked bounds, or what is wrong with them."""
    try:
        arrays = [cu.cpu().numpy() if isinstance(cu, torch.Tensor) else cu for cu in every]
        return [check_cu_seqlens(cu, tokens=tokens) for cu in arrays], None
    except (ValueError, TypeError) as error:
        return [], str(error)
