"""The buffers of a call: what arrives from other workers, what is computed for them, gradients.

Each kind is one flat tensor, so that what is kept for the backward passes through autograd as one.
Legend: R buffer rows, N heads of a head_group, D key dim, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libra.runtime.device_plan import DevicePlan
from libra.runtime.workspace import piece


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """A flat tensor as one [R, N, D] a chunk, cut when it is asked for: most calls need few."""

    flat: torch.Tensor
    starts: tuple[int, ...]
    """Rows before each chunk, and all rows."""
    heads: int
    dim: int

    def __getitem__(self, chunk: int) -> torch.Tensor:
        start, stop = self.starts[chunk : chunk + 2]
        return piece(self.flat, start * self.heads * self.dim, (stop - start, self.heads, self.dim))


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Q, K and V that a worker computes with and does not hold as a kernel reads them."""

    q_RND: Chunks
    k_RND: Chunks
    v_RNE: Chunks


def fetched_chunks(flat: torch.Tensor, device_plan: DevicePlan) -> Fetched:
    """Cut a flat tensor of `memory.fetched` elements."""
    q = device_plan.memory.fetched_q
    q_RND = q_chunks(flat[:q], device_plan, device_plan.heads.dim)
    return Fetched(q_RND, *kv_chunks(flat[q:], device_plan))


def kv_chunks(flat: torch.Tensor, device_plan: DevicePlan) -> tuple[Chunks, Chunks]:
    """Cut a flat tensor into K and V of each chunk, or their gradients."""
    heads, kv_heads, starts = (
        device_plan.heads,
        device_plan.rank_plan.head_groups.kv_heads,
        device_plan.kv_starts,
    )
    k = starts[-1] * kv_heads * heads.dim
    return (
        Chunks(flat[:k], starts, kv_heads, heads.dim),
        Chunks(flat[k:], starts, kv_heads, heads.value_dim),
    )


def q_chunks(flat: torch.Tensor, device_plan: DevicePlan, dim: int) -> Chunks:
    """Cut a flat tensor into rows of the queries computed for others: themselves, their outputs,
    or gradients of either.
    """
    return Chunks(flat, device_plan.q_starts, device_plan.rank_plan.head_groups.heads, dim)
