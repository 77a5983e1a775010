"""Models: decoder shapes, their parameters and the work of their linear layers.

A layer is attention (q, k, v and output projections, no biases) and a gated feed-forward network of
three matrices, or `experts` of them behind a router.  All layers are alike.  Work is counted for
matrix products only, two operations a parameter and token; attention itself is counted elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from libra.config import HeadShape, check_fields
from libra.cost.fields import read_presets


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shape of a decoder."""

    name: str
    """Name in reports."""

    layers: int
    """Decoder layers."""

    hidden: int
    """Elements of the residual stream."""

    q_heads: int
    """Query heads."""

    kv_heads: int
    """Key/value heads; must divide the query heads."""

    head_dim: int
    """Elements of one head."""

    ffn: int
    """Inner elements of the feed-forward network, or of one expert."""

    vocab: int
    """Rows of the embedding."""

    experts: int = 1
    """Routed experts of a layer; 1 for a dense model."""

    active_experts: int = 1
    """Routed experts that serve a token."""

    shared_experts: int = 0
    """Experts of size `ffn` that serve every token in addition to the routed ones."""

    tied_embeddings: bool = False
    """Whether the output projection is the embedding."""

    qk_norm: bool = False
    """Whether queries and keys are normalised per head, with a weight each."""

    def __post_init__(self) -> None:
        check_fields(self, zero=("shared_experts",))
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"Model.kv_heads {self.kv_heads} does not divide Model.q_heads {self.q_heads}"
            )
        if self.active_experts > self.experts:
            raise ValueError(
                f"Model.active_experts is {self.active_experts} of {self.experts} experts"
            )

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's four projections."""
        return 2 * self.hidden * (self.q_heads + self.kv_heads) * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert, or of a dense feed-forward network."""
        return 3 * self.hidden * self.ffn

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one layer that every rank of its stage holds or shards by TP."""
        # A dense layer is counted as one expert that serves every token, without a router.
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        always = self.shared_experts if self.experts > 1 else 1 + self.shared_experts
        return self.attention_parameters + norms + self.router + always * self.expert_parameters

    @property
    def routed_layer_parameters(self) -> int:
        """Parameters of one layer's routed experts, which ep spreads; 0 for a dense model."""
        return self.experts * self.expert_parameters if self.experts > 1 else 0

    @property
    def router(self) -> int:
        """Parameters of one layer's router; 0 if dense."""
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and as many again for an untied output projection."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        layer = self.dense_layer_parameters + self.routed_layer_parameters
        ends = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * layer + ends + self.hidden  # and the last norm

    @property
    def layer_flops(self) -> int:
        """FLOPs of one layer's matrix products for one token, forward."""
        # Every product takes two operations a parameter: a multiplication and an addition.
        serving = self.active_experts + self.shared_experts
        products = self.attention_parameters + self.router + serving * self.expert_parameters
        return 2 * products

    @property
    def output_flops(self) -> int:
        """FLOPs of the output projection for one token, forward."""
        return 2 * self.embedding_parameters

    @property
    def layer_elements(self) -> int:
        """Elements of the activations of one token in one layer, forward.

        Two norms, q, k, v, the attention's output and its projection, the routed copies of the
        token and the experts' outputs, the gate, its partner and their product.
        """
        serving = self.active_experts + self.shared_experts
        routed = 2 * self.active_experts * self.hidden if self.experts > 1 else 0
        heads = 2 * (self.q_heads + self.kv_heads) * self.head_dim
        return 4 * self.hidden + heads + routed + 3 * serving * self.ffn

    def heads(self, *, tp: int = 1, bytes: int = 2) -> HeadShape:
        """Attention heads of one worker, as the planner counts them.

        Key/value heads fewer than `tp` are held by several ranks.  ValueError unless `tp` divides
        the query heads, and divides or is a multiple of the key/value heads.
        """
        if self.q_heads % tp or (self.kv_heads % tp and tp % self.kv_heads):
            raise ValueError(
                f"tp={tp} does not fit {self.name}'s {self.q_heads} query and {self.kv_heads} "
                "key/value heads; choose a tp that divides them"
            )
        # For example 4 key/value heads at tp = 8: every head is held by two ranks.
        kv = max(1, self.kv_heads // tp)
        return HeadShape(q=self.q_heads // tp, kv=kv, dim=self.head_dim, bytes=bytes)


MODELS: Final[Mapping[str, Model]] = read_presets(Model, "model")
"""Presets by the name that `--model` and description files use."""
