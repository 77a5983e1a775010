"""A small Qwen3-shaped decoder whose attention is one function that you pass in.

RMSNorm, per-head norm of q and k, rotary positions, grouped-query attention, SwiGLU, and (by
choice) tied embeddings.  It works on the tokens of one rank, a row of packed samples.  Their
positions come from `sample_positions`, and only `attend` looks at more than one token, so the same
model runs on a context-parallel shard when `attend` is context-parallel.

Shape suffixes: T tokens on this rank, C model width, N query heads, M key/value heads,
D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`attend(q_TND, k_TMD, v_TMD) -> out_TND`: causal attention inside each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of the model."""

    vocab: int
    width: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn_width: int = 384
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"DecoderConfig.kv_heads is {self.kv_heads}; it must divide heads, {self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"DecoderConfig.head_dim is {self.head_dim}; rotation pairs need an even number"
            )


def sample_positions(cu_seqlens: ArrayLike, pack_positions: ArrayLike) -> NDArray[np.int64]:
    """Position of each token inside its own sample, int64 [T].

    `cu_seqlens` [samples + 1] holds the sample bounds of the whole pack; `pack_positions` [T] holds
    the positions of this rank's tokens in the pack, in any order.  Padding counts from the last
    bound.
    """
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    positions = np.asarray(pack_positions, dtype=np.int64)
    return positions - bounds[np.searchsorted(bounds, positions, side="right") - 1]


def rotation(positions_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, fp32 [T, 1, D / 2] each."""
    exponents = torch.arange(0, head_dim, 2, device=positions_T.device) / head_dim
    angles = positions_T[:, None].double() / theta ** exponents.double()
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


def rotate(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of every head by its token's angles."""
    left, right = x_TND.chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(x_TND.dtype)


class Attention(nn.Module):
    """Projections, per-head norms and rotation around `attend`."""

    def __init__(self, config: DecoderConfig, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.head_dim = config.head_dim
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, q_width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.width, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x_TC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens = len(x_TC)
        q_TND = self.q_norm(self.q_proj(x_TC).view(tokens, -1, self.head_dim))
        k_TMD = self.k_norm(self.k_proj(x_TC).view(tokens, -1, self.head_dim))
        v_TMD = self.v_proj(x_TC).view(tokens, -1, self.head_dim)
        out_TND = self.attend(rotate(q_TND, cos, sin), rotate(k_TMD, cos, sin), v_TMD)
        return self.o_proj(out_TND.reshape(tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TC)) * self.up_proj(x_TC))


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: DecoderConfig, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, attend)
        self.ffn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_TC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_TC = x_TC + self.attention(self.attention_norm(x_TC), cos, sin)
        return x_TC + self.ffn(self.ffn_norm(x_TC))


class Decoder(nn.Module):
    """Tokens and sample positions in, logits out, without regard to the tokens of other ranks."""

    def __init__(self, config: DecoderConfig, attend: Attend) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every matrix from N(0, 0.02), those that write to the residual stream smaller."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5)
            else:
                nn.init.normal_(parameter, std=0.02)
        if self.config.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Logits [T, V] of the token after each of `token_ids_T`, both int64 [T]."""
        cos, sin = rotation(positions_T, self.config.head_dim, self.config.rope_theta)
        x_TC = self.embed(token_ids_T)
        for block in self.blocks:
            x_TC = block(x_TC, cos, sin)
        return self.head(self.norm(x_TC))


def local_attention(cu_seqlens: ArrayLike) -> Attend:
    """Plain attention of whole samples on one device, which every other `attend` must equal."""
    bounds = np.asarray(cu_seqlens, dtype=np.int64).tolist()

    def attend(q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(
                q_TND[start:stop].transpose(0, 1)[None],
                k_TMD[start:stop].transpose(0, 1)[None],
                v_TMD[start:stop].transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for start, stop in pairwise(bounds)
            if stop > start
        ]
        return torch.cat(parts)

    return attend
