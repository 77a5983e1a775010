"""Seconds of one microbatch on every pipeline stage, from the seconds of its attention.

Besides attention a layer takes, on each rank and forward:

- matrix products: FLOPs of its linear layers over the rate of large products;
- elementwise work: every activation written and read once, at memory bandwidth;
- tensor parallelism: two all-gathers and two reduce-scatters of the residual stream;
- expert parallelism: two all-to-alls of every token, once for each expert that serves it.

Backward takes the products and elementwise work twice and the exchanges once.  Recomputation adds
one forward to the backward, attention with its exchanges included.

Simplifications.  Only attention hides exchanges: those of tp and ep are exposed.  Experts are
served evenly.  All of these seconds depend on tokens alone, and every pack has as many, so they
delay all schemes alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from libra.cost.arrays import Seconds
from libra.cost.collectives import exchange_seconds, ring_seconds
from libra.cost.hardware import Cluster
from libra.cost.models import Model
from libra.cost.parallelism import Parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSeconds:
    """Seconds of one layer, or of the output projection, without attention."""

    matmul: float
    elementwise: float
    exchanges: float
    """Transfers of one pass, of tensor and expert parallelism."""

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.matmul + self.elementwise + self.exchanges

    @property
    def backward(self) -> float:
        """One backward pass, without a recomputed forward."""
        return 2 * (self.matmul + self.elementwise) + self.exchanges


def layer_seconds(model: Model, parallelism: Parallelism, cluster: Cluster) -> LinearSeconds:
    """One layer of one microbatch on a rank, without attention."""
    rows, tp = parallelism.rows, parallelism.tp
    stream = rows * model.hidden * parallelism.element_bytes
    # Tensor parallelism with sequence parallelism: every rank holds its share of all activations,
    # and gathers the whole stream before the products of attention and of the feed-forward network.
    held = rows * model.layer_elements * parallelism.element_bytes / tp
    routed = stream * model.active_experts / tp  # a dense model has ep = 1 and exchanges nothing
    return LinearSeconds(
        matmul=rows * model.layer_flops / tp / cluster.matmul_flops,
        elementwise=2 * held / cluster.memory_bandwidth,
        exchanges=4 * ring_seconds(stream, tp, cluster)
        + 2 * exchange_seconds(routed, parallelism.ep, cluster, stride=tp),
    )


def output_seconds(model: Model, parallelism: Parallelism, cluster: Cluster) -> LinearSeconds:
    """The output projection and the loss of one microbatch on a rank of the last stage."""
    rows, tp = parallelism.rows, parallelism.tp
    logits = rows * model.vocab * (parallelism.element_bytes + 4) / tp  # and fp32 for the loss
    return LinearSeconds(
        matmul=rows * model.output_flops / tp / cluster.matmul_flops,
        elementwise=2 * logits / cluster.memory_bandwidth,
        exchanges=ring_seconds(rows * model.hidden * parallelism.element_bytes, tp, cluster),
    )


def microbatch_seconds(
    model: Model,
    parallelism: Parallelism,
    cluster: Cluster,
    *,
    attention_forward: ArrayLike,
    attention_backward: ArrayLike,
    linear: ArrayLike = 1.0,
) -> tuple[Seconds, Seconds]:
    """Forward and backward seconds of every model chunk, [chunks, ...] each, for microbatches whose
    attention takes the seconds given.

    `attention_forward` and `attention_backward` [...] are one layer's, exchanges included, for any
    number of microbatches; they broadcast.  `linear` are a microbatch's tokens over L, other than 1
    where packs differ in length: all work but attention grows with them.  The last chunk has the
    output projection and the loss too.  The backward has the recomputed forward, where there is
    one.
    """
    attention = np.broadcast_arrays(attention_forward, attention_backward, linear)
    forward, backward, share = (np.asarray(values, dtype=np.float64) for values in attention)
    # Step 1: every chunk's layers; all that is not attention grows with the tokens of the pack.
    layers = parallelism.chunk_layers(model)
    layer = layer_seconds(model, parallelism, cluster)
    once = layers * (forward + share * layer.forward)
    again = once if parallelism.recompute == "full" else 0.0
    twice = layers * (backward + share * layer.backward) + again
    every = np.stack([once] * parallelism.chunks), np.stack([twice] * parallelism.chunks)

    # Step 2: the output projection and the loss, in the last chunk.  They are never recomputed:
    # their backward follows their forward at once.
    output = output_seconds(model, parallelism, cluster)
    every[0][-1] += share * output.forward
    every[1][-1] += share * output.backward
    return every
