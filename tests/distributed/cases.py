"""What ranks run in attention tests: Libra on a rank's rows against the plain reference on its
whole pack.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import libra
from libra.runtime.process_groups import Groups
from tests.reference import block_diagonal_attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem over a whole job."""

    bounds: list[list[int]]
    """cu_seqlens of each data-parallel replica."""
    tokens: int
    cp: int = 1
    heads: tuple[int, int, int, int] = (4, 2, 8, 8)
    """Query heads, key/value heads, key dim, value dim."""
    dtype: torch.dtype = torch.float64
    seed: int = 0
    config: libra.PoolConfig = field(default_factory=lambda: libra.PoolConfig(pool_size=2))


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest differences from the reference, relative to its largest value where that exceeds 1,
    and the plan's loads.
    """

    out: float
    dq: float
    dk: float
    dv: float
    load: list[int]

    @property
    def worst(self) -> float:
        return max(self.out, self.dq, self.dk, self.dv)


def make_pack(case: Case, replica: int) -> list[torch.Tensor]:
    """q, k, v and dout of a whole pack; the same on every rank that asks."""
    generator = torch.Generator().manual_seed(1000 * case.seed + replica)
    hq, hkv, d, e = case.heads
    shapes = [(hq, d), (hkv, d), (hkv, e), (hq, e)]
    return [
        torch.randn(case.tokens, *shape, generator=generator, dtype=torch.float64).to(case.dtype)
        for shape in shapes
    ]


def reference(case: Case, replica: int) -> list[torch.Tensor]:
    """out, dq, dk, dv of a whole pack in fp64."""
    q, k, v, dout = (t.double() for t in make_pack(case, replica))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = block_diagonal_attention(q, k, v, case.bounds[replica])
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def my_rows(case: Case, cp_rank: int) -> torch.Tensor:
    """Pack positions of this rank's rows."""
    return torch.from_numpy(
        libra.local_positions(case.tokens, case.cp, cp_rank, case.config.shard_layout)
    )


def compare(
    case: Case, replica: int, cp_rank: int, got: list[torch.Tensor], load: list[int]
) -> Errors:
    """Errors of this rank's out, dq, dk, dv."""
    rows = my_rows(case, cp_rank)
    wanted = [tensor[rows] for tensor in reference(case, replica)]
    worst = [
        float((a.double() - b).abs().max() / b.abs().max().clamp_min(1.0)) if a.numel() else 0.0
        for a, b in zip(got, wanted, strict=True)
    ]
    return Errors(out=worst[0], dq=worst[1], dk=worst[2], dv=worst[3], load=load)


@functools.cache
def make_mesh(world_size: int, cp: int) -> DeviceMesh:
    """One mesh of a shape for all cases: a gloo group's threads wake up 100 times a second."""
    return init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))


def make_pool(world_size: int, cp: int, config: libra.PoolConfig) -> libra.SequencePool:
    """A pool on CPU ranks, with the groups of earlier cases' pools of the same members."""
    key = (world_size, cp, config.pool_size)
    pool = libra.SequencePool(make_mesh(world_size, cp), config, groups=_groups.get(key))
    _groups[key] = pool.groups
    return pool


_groups: dict[tuple[int, int, int], Groups] = {}


def attention_case(rank: int, world_size: int, case: Case) -> Errors:
    """Forward and backward through the public API."""
    pool = make_pool(world_size, case.cp, case.config)
    replica, cp_rank = rank // case.cp, rank % case.cp
    rows = my_rows(case, cp_rank)
    *qkv, dout = (tensor[rows] for tensor in make_pack(case, replica))
    qkv = [tensor.requires_grad_() for tensor in qkv]
    with pool.microbatch(case.bounds[replica], tokens=case.tokens) as microbatch:
        out = libra.libra_attention(*qkv)
        gradients = torch.autograd.grad(out, qkv, dout)
    load = microbatch.plan().load.tolist()
    errors = compare(case, replica, cp_rank, [out.detach(), *gradients], load)
    pool.close()
    return errors
