"""The memory of one call: what arrives from other workers, and outputs computed for them.

Each is one flat allocation cut into views per chunk, so that it passes through autograd as one
tensor. Legend: R buffer rows, N heads of a lane, D key dim, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libra.runtime.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Q, K and V that a worker computes with and does not hold, per chunk."""

    q_RND: list[torch.Tensor]
    k_RND: list[torch.Tensor]
    v_RNE: list[torch.Tensor]


def fetched_size(program: Program) -> int:
    """Elements of the flat buffer behind `Fetched`."""
    heads, lanes = program.heads, program.route.lanes
    q = sum(message.received for message in program.q) * lanes.heads * heads.dim
    kv = sum(a.rows for a in program.assembly) * lanes.kv_heads * (heads.dim + heads.value_dim)
    return q + kv


def outputs_size(program: Program) -> int:
    """Elements of the flat buffer of outputs computed for other workers."""
    rows = sum(message.received for message in program.q)
    return rows * program.route.lanes.heads * program.heads.value_dim


def fetched_views(flat: torch.Tensor, program: Program) -> Fetched:
    """Cut the flat buffer into its chunks."""
    heads, lanes = program.heads, program.route.lanes
    q_rows = [message.received for message in program.q]
    kv_rows = [assembly.rows for assembly in program.assembly]
    q_size = sum(q_rows) * lanes.heads * heads.dim
    k_size = sum(kv_rows) * lanes.kv_heads * heads.dim
    return Fetched(
        q_RND=_cut(flat[:q_size], q_rows, lanes.heads, heads.dim),
        k_RND=_cut(flat[q_size : q_size + k_size], kv_rows, lanes.kv_heads, heads.dim),
        v_RNE=_cut(flat[q_size + k_size :], kv_rows, lanes.kv_heads, heads.value_dim),
    )


def output_views(flat: torch.Tensor, program: Program) -> list[torch.Tensor]:
    """Cut the flat buffer of outputs (or their gradients) into its chunks, each [R, N, E]."""
    rows = [message.received for message in program.q]
    return _cut(flat, rows, program.route.lanes.heads, program.heads.value_dim)


def _cut(flat: torch.Tensor, rows: list[int], heads: int, dim: int) -> list[torch.Tensor]:
    pieces = flat.split([count * heads * dim for count in rows])
    return [piece.view(count, heads, dim) for piece, count in zip(pieces, rows, strict=True)]
