"""Schemes as this rank runs them: a pack's bounds in, an attention function of its rows out.

Schemes share pools, and pools share process groups, where their members are the same.  That is safe
because a contestant is asked to prepare only once the one before it has planned.
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
from libra.bench.schemes import Scheme, scheme_config
from libra.config import HeadShape, PoolConfig, ShardLayout
from libra.data.lengths import causal_pairs
from libra.runtime.attention import libra_attention
from libra.runtime.kernels.interface import Kernel
from libra.runtime.pool import SequencePool
from libra.runtime.process_groups import Groups

IntArray = NDArray[np.int64]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One microbatch, planned."""

    attend: Attend
    load: int
    """Causal pairs times heads that this rank computes."""
    sent: int
    """Bytes that it sends in forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRunner:
    """One scheme on this rank."""

    scheme: Scheme
    pool_size: int
    shard_layout: ShardLayout
    prepare: Callable[[IntArray, int, HeadShape], Ready]
    """Of this rank's pack: sample bounds and tokens, and the heads.  Collective."""


@dataclass(frozen=True, slots=True)
class Field:
    """All contestants of a run."""

    contestants: tuple[SchemeRunner, ...]
    pools: tuple[SequencePool, ...]

    def close(self) -> None:
        """End the pools' planner threads; process groups stay."""
        for pool in self.pools:
            pool.close()


def make_field(
    schemes: Iterable[Scheme],
    mesh: DeviceMesh,
    config: PoolConfig,
    kernel: Kernel,
    *,
    timeout: timedelta | None = None,
) -> Field:
    """Contestants on a mesh of dimensions (dp, cp).  Collective over the mesh.

    Raises ValueError for a pool size that doesn't divide the replicas.
    """
    pools: dict[PoolConfig, SequencePool] = {}
    groups: dict[int, Groups] = {}
    made = []
    for scheme in dict.fromkeys(schemes):
        chosen = scheme_config(scheme, config, mesh["dp"].size())
        if scheme == "ring":
            prepare = partial(_prepare_ring, mesh, kernel, chosen.shard_layout)
        else:
            if chosen not in pools:
                size = chosen.pool_size
                pools[chosen] = SequencePool(
                    mesh, chosen, kernel=kernel, groups=groups.get(size), timeout=timeout
                )
                groups[size] = pools[chosen].groups
            prepare = partial(_prepare_pooled, pools[chosen])
        made.append(
            SchemeRunner(
                scheme=scheme,
                pool_size=chosen.pool_size,
                shard_layout=chosen.shard_layout,
                prepare=prepare,
            )
        )
    return Field(tuple(made), tuple(pools.values()))


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
        cu_seqlens,
        mesh.get_group("cp"),
        tokens=tokens,
        shard_layout=shard_layout,
        kernel=kernel,
    )
    steps = microbatch.steps
    own = steps.reads[0]
    load = int(causal_pairs(own.k_len - own.q_len, own.k_len).sum())
    load += sum(int((reads.q_len * reads.k_len).sum()) for reads in steps.reads[1:])
    rows = sum(
        steps.stop[source] - steps.first[source]
        for step, source in enumerate(map(steps.source, range(steps.ranks)))
        if step < steps.last[source]
    )
    width = heads.kv * (heads.dim + heads.value_dim) * heads.bytes
    return Ready(
        attend=partial(ring_attention, microbatch=microbatch),
        load=load * heads.q,
        sent=rows * width,
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
