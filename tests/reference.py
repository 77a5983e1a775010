"""The slow, obviously right attention that everything is compared with."""

from __future__ import annotations

import torch


def block_diagonal_attention(
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    cu_seqlens: list[int],
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention inside each sample of a pack, [T, N, E], by dense softmax; padding rows give
    zero.
    """
    group = q_TND.shape[1] // k_TND.shape[1]
    scale = q_TND.shape[2] ** -0.5 if scale is None else scale
    k_TND, v_TNE = k_TND.repeat_interleave(group, 1), v_TNE.repeat_interleave(group, 1)
    position = torch.arange(len(q_TND))
    bounds = torch.tensor(cu_seqlens)
    sample = torch.bucketize(position, bounds, right=True)
    allowed = (sample[:, None] == sample[None, :]) & (position[:, None] >= position[None, :])
    real = position < bounds[-1]
    allowed &= real[:, None]
    scores = torch.einsum("qnd,knd->nqk", q_TND, k_TND) * scale
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    weights = torch.where(real[None, :, None], weights, 0.0)
    return torch.einsum("nqk,kne->qne", weights, v_TNE)
