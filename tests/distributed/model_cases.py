"""A small decoder over packs of very unlike workload: whole in one process, which is the truth,
and what each rank of a job needs to run the same decoder on its shards.

The loss is a sum over targets, divided by the targets of the whole window.  So losses and gradients
of ranks add up, over context-parallel shards and data-parallel replicas alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import libra
from examples.decoder import Attend, Decoder, DecoderConfig, sample_positions
from libra.data.cp_shards import IGNORED_LABEL
from libra.runtime.attention import libra_attention  # makes torch.ops.libra.attention known
from tests.reference import block_diagonal_attention

TOKENS = 45
"""L: odd, so that shards are uneven."""
MODEL = DecoderConfig(vocab=29, width=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_width=32)


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One packed sequence; its last tokens may be padding."""

    bounds: list[int]
    ids: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses of all steps, gradients of the last one, and what it took."""

    losses: list[float]
    gradients: dict[str, Tensor] = field(repr=False)
    evaluated: list[float] = field(default_factory=list)
    """Losses of the same windows without gradients, before each step."""
    bytes_moved: int = 0
    """By the plans of this rank's pool, over all training microbatches."""
    attention_forwards: int = 0
    """On this rank, in training."""


@functools.cache
def make_pack(step: int, microbatch: int, replica: int) -> Pack:
    """By turns: one sample, short ones, any, mostly padding."""
    random = np.random.default_rng([step, microbatch, replica])
    match (step + microbatch + replica) % 4:
        case 0:
            bounds = [0, TOKENS]
        case 1:
            bounds = [*range(0, TOKENS, 6), TOKENS]
        case 2:
            cuts = random.choice(np.arange(1, TOKENS), 4, replace=False)
            bounds = [0, *sorted(cuts.tolist()), TOKENS]
        case _:
            bounds = [0, 1, 13, 20]  # at CP 2 the second contiguous shard is padding only
    ids = random.integers(0, MODEL.vocab, TOKENS)
    labels = libra.local_labels(ids, bounds, 1, 0)
    return Pack(bounds, torch.from_numpy(ids), torch.from_numpy(labels))


def targets_of(step: int, microbatches: int, replicas: int) -> int:
    """Targets of a window."""
    every = [make_pack(step, m, r).labels for m in range(microbatches) for r in range(replicas)]
    return sum(int((labels != IGNORED_LABEL).sum()) for labels in every)


def make_model(attend: Attend, dtype: torch.dtype) -> Decoder:
    """The same weights for every call, larger than usual so that attention is far from uniform."""
    torch.manual_seed(0)
    model = Decoder(MODEL, attend).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def summed_loss(model: nn.Module, pack: Pack, rows: Tensor, autocast: bool = False) -> Tensor:
    """Cross-entropy of some rows of a pack, which are all that `model` sees."""
    positions = torch.from_numpy(sample_positions(pack.bounds, rows.numpy()))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(pack.ids[rows], positions)
        return F.cross_entropy(logits, pack.labels[rows], reduction="sum")


@functools.cache
def single_process(
    replicas: int, microbatches: int, steps: int, dtype: torch.dtype, autocast: bool
) -> Trained:
    """The truth: every pack of a window, whole, one after the other."""
    bounds: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_diagonal_attention(q, k, v, bounds)

    model = make_model(attend, dtype)
    optimizer = make_optimizer(model)
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        targets = targets_of(step, microbatches, replicas)
        losses.append(0.0)
        for microbatch in range(microbatches):
            for replica in range(replicas):
                pack = make_pack(step, microbatch, replica)
                bounds[:] = pack.bounds
                loss = summed_loss(model, pack, torch.arange(TOKENS), autocast) / targets
                loss.backward()
                losses[-1] += loss.item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients.values())
    return Trained(losses=losses, gradients=gradients)


class LibraAttend:
    """Attention of the decoder.  Without a microbatch of its own it takes the innermost one."""

    def __init__(self) -> None:
        self.microbatch: libra.Microbatch | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return libra_attention(q, k, v, microbatch=self.microbatch)

    @contextmanager
    def using(self, microbatch: libra.Microbatch | None) -> Iterator[None]:
        before, self.microbatch = self.microbatch, microbatch
        try:
            yield
        finally:
            self.microbatch = before
