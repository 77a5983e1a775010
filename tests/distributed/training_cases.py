"""What ranks run in tests of whole training steps: the loop of a user, with its wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import libra
from examples.decoder import Decoder
from tests.distributed.cases import make_pool
from tests.distributed.model_cases import (
    TOKENS,
    LibraAttend,
    Trained,
    make_model,
    make_optimizer,
    make_pack,
    summed_loss,
    targets_of,
)

Wrapping = Literal["none", "ddp", "fsdp", "hsdp"]
Recompute = Literal[
    "nothing", "blocks", "blocks, reentrant", "all but attention", "all but projections"
]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a job trains."""

    config: libra.PoolConfig
    cp: int = 1
    wrapping: Wrapping = "none"
    recompute: Recompute = "nothing"
    order: Literal["in turn", "forwards first"] = "in turn"
    """`forwards first` is what a pipeline stage does: every forward, then every backward."""
    microbatches: int = 1
    steps: int = 1
    prefetch: bool = False
    evaluate: Literal["", "no_grad", "inference_mode"] = ""
    trains: str = ""
    """Part of the names of the parameters that train."""
    autocast: bool = False
    dtype: torch.dtype = torch.float64


def train(rank: int, world_size: int, case: Training) -> Trained:
    """Training steps through the public API, on this rank's shards."""
    replicas, (replica, cp_rank) = world_size // case.cp, divmod(rank, case.cp)
    config = case.config
    pool = make_pool(world_size, case.cp, config)
    rows = torch.from_numpy(libra.local_positions(TOKENS, case.cp, cp_rank, config.shard_layout))
    attend = LibraAttend()
    bare = make_model(attend, case.dtype)
    for name, parameter in bare.named_parameters():
        parameter.requires_grad_(case.trains in name)
    recompute_blocks(bare, attend, case.recompute)
    model = wrap(bare, case, world_size)
    optimizer = make_optimizer(model)
    scale = 1 if case.wrapping == "none" else world_size  # DDP and FSDP average over ranks
    losses, evaluated, gradients, microbatches = [], [], {}, []

    for step in range(case.steps):
        targets = targets_of(step, case.microbatches, replicas)
        packs = [make_pack(step, microbatch, replica) for microbatch in range(case.microbatches)]
        if case.evaluate:
            total = torch.zeros((), dtype=torch.float64)
            for pack in packs:
                with getattr(torch, case.evaluate)(), pool.microbatch(pack.bounds, tokens=TOKENS):
                    total += summed_loss(model, pack, rows).double() / targets
            evaluated.append(over_all_ranks(total).item())
        if case.prefetch:
            first = replica // config.pool_size * config.pool_size
            members = range(first, first + config.pool_size)
            for microbatch in range(case.microbatches):
                bounds = [make_pack(step, microbatch, member).bounds for member in members]
                pool.prefetch(bounds, tokens=TOKENS)

        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        waiting = []
        for pack in packs:
            microbatch = pool.microbatch(pack.bounds, tokens=TOKENS)
            microbatches.append(counting(microbatch))
            if case.order == "in turn":
                with microbatch, summing_gradients(model, pack is packs[-1]):
                    loss = summed_loss(model, pack, rows, case.autocast) / targets
                    (loss * scale).backward()
            else:
                with attend.using(microbatch):
                    loss = summed_loss(model, pack, rows, case.autocast) / targets
                waiting.append(loss)
            total += loss.detach().double()
        for loss in waiting:
            with summing_gradients(model, loss is waiting[-1]):
                (loss * scale).backward()
        gradients = {n: whole(p.grad) for n, p in bare.named_parameters() if p.requires_grad}
        if case.wrapping == "none":
            gradients = summed(gradients)
            for name, gradient in gradients.items():
                bare.get_parameter(name).grad = gradient.clone()
        losses.append(over_all_ranks(total).item())
        if step + 1 < case.steps:
            optimizer.step()

    moved = [microbatch.plan() for microbatch, _ in microbatches]
    pool.close()
    return Trained(
        losses=losses,
        gradients=gradients,
        evaluated=evaluated,
        bytes_moved=sum(int(plan.traffic.sum()) for plan in moved),
        attention_forwards=sum(len(calls) for _, calls in microbatches),
    )


def wrap(model: Decoder, case: Training, world_size: int) -> nn.Module:
    """The model in its data-parallel wrapper, over all ranks: shards are data too."""
    if case.wrapping == "ddp":
        return DistributedDataParallel(model)
    if case.wrapping in ("fsdp", "hsdp"):
        mesh = _mesh(world_size, case.cp if case.wrapping == "hsdp" else 0)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


@functools.cache
def _mesh(world_size: int, cp: int) -> DeviceMesh:
    """All ranks in a row, or replicas that context-parallel ranks shard."""
    if not cp:
        return init_device_mesh("cpu", (world_size,))
    return init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("replicate", "shard"))


def summing_gradients(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Gradients stay on their rank until the window's last microbatch."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def recompute_blocks(model: Decoder, attend: LibraAttend, recompute: Recompute) -> None:
    """Activation checkpointing of every block.  A recomputation has its forward's own microbatch,
    if there was one, else the innermost active one.
    """
    kept = {
        "all but attention": torch.ops.libra.attention.default,
        "all but projections": torch.ops.aten.mm.default,
    }.get(recompute)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == kept else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": recompute == "blocks, reentrant"}
    if kept is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*inputs: Tensor) -> Tensor:
            microbatch = attend.microbatch

            def run(*inputs: Tensor) -> Tensor:
                with attend.using(microbatch):
                    return forward(*inputs)

            return checkpoint(run, *inputs, **options)

        return call

    if recompute != "nothing":
        for block in model.blocks:
            block.forward = checkpointed(block.forward)


def counting(microbatch: libra.Microbatch) -> tuple[libra.Microbatch, list[None]]:
    """The microbatch, and a list that grows with each of its attention forwards."""
    calls: list[None] = []
    attend = microbatch.attend

    def counted(*args: Any) -> Any:
        calls.append(None)
        return attend(*args)

    microbatch.attend = counted
    return microbatch, calls


def over_all_ranks(part: Tensor) -> Tensor:
    """The sum over all ranks."""
    total = part.clone()
    dist.all_reduce(total)
    return total


def summed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Data parallelism at its plainest: one all-reduce of all gradients."""
    flat = over_all_ranks(torch.cat([gradient.flatten() for gradient in gradients.values()]))
    parts = flat.split([gradient.numel() for gradient in gradients.values()])
    return {
        name: part.view_as(gradient)
        for (name, gradient), part in zip(gradients.items(), parts, strict=True)
    }


def whole(gradient: Tensor) -> Tensor:
    """A gradient with all its shards."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
