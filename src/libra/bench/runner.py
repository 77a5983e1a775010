"""A scheme on one rank: the samples of its steps, and an attention function of the rank's rows.

Schemes share pools, and pools share process groups, where their members are the same.  That is safe
because a scheme prepares a step only after the scheme before it has planned its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from libra.baselines.ring import RingMicrobatch, ring_attention
from libra.baselines.wlb import WlbConfig, pack_by_cost
from libra.config import HeadShape, PoolConfig
from libra.data.lengths import IntArray
from libra.data.packing import Packs
from libra.runtime.attention import libra_attention
from libra.runtime.kernels.interface import Kernel
from libra.runtime.pool import SequencePool
from libra.runtime.process_groups import Groups
from libra.simulate.schemes import Scheme


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One microbatch of every replica, [DP]."""

    fragments: tuple[IntArray, ...]
    """Indices into the window's fragments, in the order of the pack."""
    tokens: tuple[int, ...]
    """Tokens of each pack, padding included."""

    def cu_seqlens(self, window: Packs, replica: int) -> IntArray:
        """Sample bounds of a replica's pack, int64."""
        return np.append(0, np.cumsum(window.lengths[self.fragments[replica]]))


def window_steps(
    window: Packs, scheme: Scheme, *, dp_size: int, pool_size: int, wlb: WlbConfig
) -> list[Step]:
    """Every step of a window of GBS packs; `pool_size` is the scheme's.

    Raises ValueError for sizes that don't divide, and where WLB's packs cannot take the samples.
    """
    if len(window) % dp_size:
        raise ValueError(
            f"global_batch={len(window)} packs over {dp_size} replicas: replicas must divide "
            "global_batch"
        )
    if scheme.packing == "by-cost":
        packs = pack_by_cost(window.lengths, len(window), window.tokens, wlb)
        # Packs of their own sizes, without padding.
        tokens = [int(window.lengths[pack].sum()) for pack in packs]
    else:
        # Row by row of [steps, DP], the packs of one step stand next to each other.
        order = scheme.pools(window.workloads, pool_size, dp_size // pool_size).ravel().tolist()
        spans = map(window.pieces_of, order)
        packs = [np.arange(span.start, span.stop) for span in spans]
        tokens = [window.tokens] * len(packs)
    steps = [slice(first, first + dp_size) for first in range(0, len(packs), dp_size)]
    return [Step(tuple(packs[step]), tuple(tokens[step])) for step in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One microbatch, planned."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    load: int
    """Causal pairs times heads that this rank computes."""
    sent: int
    """Bytes that it sends in forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRunner:
    """One scheme on this rank, in a mesh of dimensions (dp, cp)."""

    scheme: Scheme
    config: PoolConfig
    mesh: DeviceMesh
    kernel: Kernel
    pool: SequencePool | None
    """None for ring attention, which has no pools."""

    def steps(self, window: Packs, wlb: WlbConfig) -> list[Step]:
        """The scheme's steps of a window."""
        dp_size, pool_size = self.mesh["dp"].size(), self.config.pool_size
        return window_steps(window, self.scheme, dp_size=dp_size, pool_size=pool_size, wlb=wlb)

    def prepare(self, cu_seqlens: IntArray, tokens: int, heads: HeadShape) -> Ready:
        """Plan the microbatch of this rank's pack, given its sample bounds.  Collective."""
        if self.pool is None:
            return self._prepare_ring(cu_seqlens, tokens, heads)
        microbatch = self.pool.microbatch(cu_seqlens, tokens=tokens)
        plan, worker = microbatch.plan(heads), self.pool.membership.worker
        return Ready(
            attend=partial(libra_attention, microbatch=microbatch),
            load=int(plan.load[worker]),
            sent=int(plan.traffic[:, worker].sum()),
        )

    def _prepare_ring(self, cu_seqlens: IntArray, tokens: int, heads: HeadShape) -> Ready:
        microbatch = RingMicrobatch(
            cu_seqlens,
            self.mesh.get_group("cp"),
            tokens=tokens,
            shard_layout=self.config.shard_layout,
            kernel=self.kernel,
        )
        steps = microbatch.steps
        # At each step a rank sends the block that it holds, until the block's last reader has it.
        sent_rows = sum(sum(steps.block_hop(step).send_splits) for step in range(steps.ranks))
        return Ready(
            attend=partial(ring_attention, microbatch=microbatch),
            load=sum(reads.pairs for reads in steps.reads) * heads.q,
            sent=sent_rows * heads.kv_bytes(heads.kv),
        )


def make_runners(
    schemes: Iterable[Scheme],
    mesh: DeviceMesh,
    config: PoolConfig,
    kernel: Kernel,
    *,
    timeout: timedelta | None = None,
) -> tuple[SchemeRunner, ...]:
    """Runners on a mesh of dimensions (dp, cp).  Collective over the mesh.

    Raises ValueError for a pool size that doesn't divide the replicas.
    """
    pools: dict[PoolConfig, SequencePool] = {}
    groups: dict[int, Groups] = {}
    runners = []
    for scheme in schemes:
        chosen, pool = scheme.pool_config(config, mesh["dp"].size()), None
        if scheme.placement != "ring":
            pool = pools.get(chosen)
            if pool is None:
                # Pools of one size have the same members, so they share process groups.
                shared = groups.get(chosen.pool_size)
                pool = SequencePool(mesh, chosen, kernel=kernel, groups=shared, timeout=timeout)
                pools[chosen], groups[chosen.pool_size] = pool, pool.groups
        runners.append(
            SchemeRunner(scheme=scheme, config=chosen, mesh=mesh, kernel=kernel, pool=pool)
        )
    return tuple(runners)


def random_rows(
    rows: int, heads: HeadShape, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that ask for gradients, and the gradient of the output."""
    draw = torch.Generator(device=device).manual_seed(seed)

    def normal(count: int, dim: int) -> Tensor:
        return torch.randn(rows, count, dim, generator=draw, dtype=dtype, device=device)

    q, k = normal(heads.q, heads.dim), normal(heads.kv, heads.dim)
    v, dout = normal(heads.kv, heads.value_dim), normal(heads.q, heads.value_dim)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout
