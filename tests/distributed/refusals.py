"""What ranks run in tests of bad input: something wrong, then something right in the same pool.

A refusal must be the same ValueError on every rank, and leave the pool usable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import libra
from libra.plan.plan_pool import plan_pool
from libra.runtime.planner_thread import Planner
from tests.distributed.cases import make_pool
from tests.reference import block_diagonal_attention

TOKENS = 16
BOUNDS = [0, 5, 5, 16]
"""The second sample has no tokens."""
CONFIG = libra.PoolConfig(pool_size=2, block_size=4, chunks=2)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """How a wrong call ended on one rank, and the error of the right call after it."""

    text: str
    then: float


def tensors(
    rows: int = TOKENS,
    q: int = 4,
    kv: int = 2,
    dim: int = 8,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Tensors:
    """q, k, v that fit a microbatch of `BOUNDS` by default; they require gradients."""
    generator = torch.Generator().manual_seed(7)

    def make(heads: int, width: int) -> torch.Tensor:
        made = torch.randn(rows, heads, width, generator=generator, dtype=torch.float64)
        made = made.to(device, dtype)
        return made.requires_grad_() if dtype.is_floating_point else made

    return make(q, dim), make(kv, dim), make(kv, value_dim)


@functools.cache
def flat_mesh(world_size: int, names: tuple[str, ...]) -> DeviceMesh:
    """One mesh for all cases, with all ranks along the last of its dimensions."""
    shape = (1,) * (len(names) - 1) + (world_size,)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def told_on_rank(wrong: Callable[[], Any]) -> str:
    """`TypeName: message` of what `wrong` raises."""
    try:
        wrong()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def right_call(pool: libra.SequencePool, shared_by: int = 1, cp_rank: int = 0) -> float:
    """Largest error of an attention call in `pool`, against the reference."""
    q, k, v = tensors()
    rows = torch.from_numpy(
        libra.local_positions(TOKENS, shared_by, cp_rank, pool.config.shard_layout)
    )
    with pool.microbatch(BOUNDS):
        out = libra.libra_attention(q[rows], k[rows], v[rows])
        out.sum().backward()
    return float((out - block_diagonal_attention(q, k, v, BOUNDS)[rows]).abs().max())


def refused_call(
    rank: int,
    world_size: int,
    here: dict[str, Any],
    options: dict[str, Any],
    reshape: Callable[[Tensors], Tensors] | None,
) -> Refusal:
    """An attention call with tensors made by `here` and `reshape`, and keyword `options`."""
    pool = make_pool(world_size, 1, CONFIG)
    q, k, v = tensors(**here)
    if reshape is not None:
        q, k, v = reshape((q, k, v))
    with pool.microbatch(BOUNDS):
        text = told_on_rank(lambda: libra.libra_attention(q, k, v, **options))
    return _finish(pool, text)


def refused_mode(rank: int, world_size: int, mode: str) -> Refusal:
    """The last rank calls in a mode of its own."""
    pool = make_pool(world_size, 1, CONFIG)
    q, k, v = tensors(dtype=torch.float32)
    odd = rank == world_size - 1
    if odd and mode == "frozen inputs":
        q, k, v = q.detach(), k.detach(), v.detach()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=odd and mode == "autocast")
    grad = torch.set_grad_enabled(not (odd and mode == "no_grad"))
    with pool.microbatch(BOUNDS), autocast, grad:
        text = told_on_rank(lambda: libra.libra_attention(q, k, v))
    return _finish(pool, text)


def refused_microbatch(
    rank: int, world_size: int, bounds: Any, tokens: int | None, cp: int = 1
) -> Refusal:
    """A microbatch of `bounds`."""
    config = CONFIG.replace(pool_size=world_size // cp)
    pool = make_pool(world_size, cp, config)
    text = told_on_rank(lambda: pool.microbatch(bounds, tokens=tokens))
    return _finish(pool, text, cp, rank % cp)


def refused_pool(
    rank: int, world_size: int, config: dict[str, Any], names: tuple[str, ...], options: Any
) -> Refusal:
    """A pool on a mesh with these dimensions."""
    mesh = flat_mesh(world_size, names)
    text = told_on_rank(lambda: libra.SequencePool(mesh, CONFIG.replace(**config), **options))
    return _finish(make_pool(world_size, 1, CONFIG), text)


def refused_kernel(rank: int, world_size: int) -> Refusal:
    """The last rank has no kernel for its device."""
    mesh = flat_mesh(world_size, ("dp",))
    usual = make_pool(world_size, 1, CONFIG)
    kernel = "flash3" if rank == world_size - 1 else None
    pool = libra.SequencePool(mesh, CONFIG, kernel=kernel, groups=usual.groups)
    with pool.microbatch(BOUNDS):
        text = told_on_rank(lambda: libra.libra_attention(*tensors()))
    pool.close()
    return _finish(usual, text)


def refused_inside_other_microbatch(rank: int, world_size: int) -> Refusal:
    """Two microbatches are open; the last rank calls inside the outer one."""
    pool = make_pool(world_size, 1, CONFIG)
    outer, inner = pool.microbatch([0, 16]), pool.microbatch(BOUNDS)
    mine = outer if rank == world_size - 1 else inner
    with outer, mine:
        text = told_on_rank(lambda: libra.libra_attention(*tensors()))
    return _finish(pool, text)


def refused_outside(rank: int, world_size: int) -> Refusal:
    """No microbatch is open."""
    pool = make_pool(world_size, 1, CONFIG)
    return _finish(pool, told_on_rank(lambda: libra.libra_attention(*tensors())))


def refused_plan(rank: int, world_size: int, fault: str) -> Refusal:
    """Something goes wrong with the plan, where it is made or where it arrives."""

    def no_plan(*_: Any, **__: Any) -> libra.PoolPlan:
        raise MemoryError("no room for a plan")

    def other_plan(bounds: Any, **options: Any) -> libra.PoolPlan:
        return plan_pool([[0, TOKENS]] * len(bounds), **options)

    receive = Planner._broadcast

    def foreign(planner: Planner, buffer: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        return np.zeros_like(receive(planner, buffer))

    def truncated(planner: Planner, buffer: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        return receive(planner, buffer)[:-16]

    pool = make_pool(world_size, 1, CONFIG)
    name, fake, guilty = {
        "no plan": ("libra.runtime.planner_thread.plan_pool", no_plan, 0),
        "another microbatch": ("libra.runtime.planner_thread.plan_pool", other_plan, 0),
        "foreign": ("libra.runtime.planner_thread.Planner._broadcast", foreign, world_size - 1),
        "truncated": ("libra.runtime.planner_thread.Planner._broadcast", truncated, world_size - 1),
    }[fault]
    with pool.microbatch(BOUNDS):
        if rank == guilty:
            with mock.patch(name, fake):
                text = told_on_rank(lambda: libra.libra_attention(*tensors()))
        else:
            text = told_on_rank(lambda: libra.libra_attention(*tensors()))
    return _finish(pool, text)


def refused_when_closed(rank: int, world_size: int) -> Refusal:
    """The pool is used after its end."""
    pool = make_pool(world_size, 1, CONFIG)
    right_call(pool)
    pool.close()
    text = told_on_rank(lambda: pool.microbatch(BOUNDS))
    return _finish(make_pool(world_size, 1, CONFIG), text)


def refused_prefetch(rank: int, world_size: int, packs: list[Any]) -> Refusal:
    """The last rank prefetches `packs`; the others prefetch what comes."""
    pool = make_pool(world_size, 1, CONFIG)
    pool._runtime.plan_for(libra.HeadShape(4, 2, 8, 8))
    right = [BOUNDS] * world_size
    text = told_on_rank(lambda: pool.prefetch(packs if rank == world_size - 1 else right))
    return _finish(pool, text)


def left_out_output(rank: int, world_size: int) -> Refusal:
    """The last rank's loss leaves out the output of its second call."""
    pool = make_pool(world_size, 1, CONFIG)
    q, k, v = tensors()
    with pool.microbatch(BOUNDS):
        first = libra.libra_attention(q, k, v)
        second = libra.libra_attention(q, k, v)
        used = first if rank == world_size - 1 else first + second
        text = told_on_rank(lambda: used.sum().backward())
    return _finish(pool, text)


def left_out_backward(rank: int, world_size: int) -> Refusal:
    """The last rank goes on to its next microbatch without a backward."""
    pool = make_pool(world_size, 1, CONFIG)
    with pool.microbatch(BOUNDS):
        out = libra.libra_attention(*tensors())
        text = told_on_rank(
            lambda: pool.microbatch(BOUNDS) if rank == world_size - 1 else out.sum().backward()
        )
    return _finish(pool, text)


def _finish(pool: libra.SequencePool, text: str, cp: int = 1, cp_rank: int = 0) -> Refusal:
    then = right_call(pool, cp, cp_rank)
    pool.close()
    return Refusal(text=text, then=then)
