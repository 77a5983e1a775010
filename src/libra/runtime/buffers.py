"""The buffers of a call: what arrives from other workers, what is computed for them, gradients.

Each kind is one flat tensor, so that what is kept for the backward passes through autograd as one.
Legend: R buffer rows, N heads of a lane, D key dim, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libra.runtime.program import Program
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


def fetched_chunks(flat: torch.Tensor, program: Program) -> Fetched:
    """Cut a flat tensor of `memory.fetched` elements."""
    q = program.memory.fetched_q
    q_RND = q_chunks(flat[:q], program, program.heads.dim)
    return Fetched(q_RND, *kv_chunks(flat[q:], program))


def kv_chunks(flat: torch.Tensor, program: Program) -> tuple[Chunks, Chunks]:
    """Cut a flat tensor into K and V of each chunk, or their gradients."""
    heads, kv_heads, starts = program.heads, program.route.lanes.kv_heads, program.kv_starts
    k = starts[-1] * kv_heads * heads.dim
    return (
        Chunks(flat[:k], starts, kv_heads, heads.dim),
        Chunks(flat[k:], starts, kv_heads, heads.value_dim),
    )


def q_chunks(flat: torch.Tensor, program: Program, dim: int) -> Chunks:
    """Cut a flat tensor into rows of the queries computed for others: themselves, their outputs,
    or gradients of either.
    """
    return Chunks(flat, program.q_starts, program.route.lanes.heads, dim)
