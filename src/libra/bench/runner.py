"""A scheme on one rank: a pack's bounds in, an attention function of the rank's rows out.

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
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from libra.baselines.ring import RingMicrobatch, ring_attention
from libra.baselines.wlb import WlbConfig
from libra.bench.steps import Step, window_steps
from libra.config import HeadShape, PoolConfig, ShardLayout
from libra.data.lengths import causal_pairs
from libra.data.packing import Packs
from libra.runtime.attention import libra_attention
from libra.runtime.kernels.interface import Kernel
from libra.runtime.pool import SequencePool
from libra.runtime.process_groups import Groups
from libra.simulate.schemes import Scheme

IntArray = NDArray[np.int64]


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
    """One scheme on this rank."""

    scheme: Scheme
    config: PoolConfig
    dp_size: int
    prepare: Callable[[IntArray, int, HeadShape], Ready]
    """Takes the sample bounds and tokens of this rank's pack, and the heads.  Collective."""
    pool: SequencePool | None

    def steps(self, window: Packs, wlb: WlbConfig) -> list[Step]:
        """The scheme's steps of a window."""
        return window_steps(
            window,
            self.scheme,
            dp_size=self.dp_size,
            pool_size=self.config.pool_size,
            wlb=wlb,
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
        chosen = scheme.pool_config(config, mesh["dp"].size())
        pool = None
        if scheme.placement == "ring":
            prepare = partial(_prepare_ring, mesh, kernel, chosen.shard_layout)
        else:
            if chosen not in pools:
                # Pools of one size have the same members, so they share process groups.
                size = chosen.pool_size
                pools[chosen] = SequencePool(
                    mesh, chosen, kernel=kernel, groups=groups.get(size), timeout=timeout
                )
                groups[size] = pools[chosen].groups
            pool = pools[chosen]
            prepare = partial(_prepare_pooled, pool)
        runners.append(
            SchemeRunner(
                scheme=scheme,
                config=chosen,
                dp_size=mesh["dp"].size(),
                prepare=prepare,
                pool=pool,
            )
        )
    return tuple(runners)


def close_pools(runners: Iterable[SchemeRunner]) -> None:
    """End the planner threads of the runners' pools; process groups stay."""
    for pool in {runner.pool for runner in runners if runner.pool is not None}:
        pool.close()


def _prepare_pooled(
    pool: SequencePool, cu_seqlens: IntArray, tokens: int, heads: HeadShape
) -> Ready:
    microbatch = pool.microbatch(cu_seqlens, tokens=tokens)
    plan = microbatch.plan(heads)
    worker = pool.membership.worker
    return Ready(
        attend=partial(libra_attention, microbatch=microbatch),
        load=int(plan.load[worker]),
        sent=int(plan.traffic[:, worker].sum()),
    )


def _prepare_ring(
    mesh: DeviceMesh,
    kernel: Kernel,
    shard_layout: ShardLayout,
    cu_seqlens: IntArray,
    tokens: int,
    heads: HeadShape,
) -> Ready:
    microbatch = RingMicrobatch(
        cu_seqlens, mesh.get_group("cp"), tokens=tokens, shard_layout=shard_layout, kernel=kernel
    )
    steps = microbatch.steps
    own, *others = steps.reads
    # Causal pairs of the own block, full rectangles of the others.
    load = int(causal_pairs(own.k_len - own.q_len, own.k_len).sum())
    load += sum(int((reads.q_len * reads.k_len).sum()) for reads in others)
    # At each step a rank sends the block that it holds, until the block's last reader has it.
    sent_rows = sum(
        steps.stop[source] - steps.first[source]
        for step, source in enumerate(map(steps.source, range(steps.ranks)))
        if step < steps.last[source]
    )
    return Ready(
        attend=partial(ring_attention, microbatch=microbatch),
        load=load * heads.q,
        sent=sent_rows * heads.kv * (heads.dim + heads.value_dim) * heads.bytes,
    )


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
