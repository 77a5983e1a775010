"""Seconds of an optimizer step from the attention of its microbatches.

    attention of the microbatches ─┬─> microbatch_seconds ──> schedule of the stages ─┬─> step
    layers, output projection ─────┘                           gradients, optimizer ──┘

Besides attention a layer takes, on each rank and forward:

- matrix products: FLOPs of its linear layers over the rate of large products;
- elementwise work: every activation written and read once, at memory bandwidth;
- tensor parallelism: two all-gathers and two reduce-scatters of the residual stream;
- expert parallelism: two all-to-alls of every token, once for each expert that serves it.

Backward takes the products and elementwise work twice and the exchanges once.  Recomputation adds
one forward to the backward, attention with its exchanges included.

Where ranks wait for each other:

- The members of a pool exchange rows in every attention layer.  At each accumulation index a pool,
  and with it each of its P replicas, takes as long as its slowest worker.
- Pools do not exchange rows with each other.  Without expert parallelism across them, a pool goes
  on to its next index as soon as it is done, and pools synchronise only when gradients are reduced:
  the step takes as long as the pool with the greatest *sum* over indices (with pipeline stages: the
  longest schedule).
- Some work synchronises all replicas at every index: experts spread over all of them, or the
  paper's attention benchmark, which ends each index with a barrier.  Then the step takes the sum
  over indices of the *slowest* pool: `lockstep`.

For example, two pools whose two microbatches take (5, 1) and (2, 3) seconds: the step takes
max(5 + 1, 2 + 3) = 6 seconds, and in lockstep max(5, 2) + max(1, 3) = 8.

Both are given.  Without pools (Ulysses) a replica is a pool of its own.

After the microbatches come the reduce-scatter of gradients, the optimizer on each rank's share
(read and written at memory bandwidth) and the all-gather of new parameters.

Simplifications.  All layers of a microbatch take the same time.  Only attention hides exchanges:
those of tp and ep are exposed.  Experts are served evenly.  Seconds without attention depend on
tokens alone, and every pack has as many, so they delay all schemes alike.  A stated share of the
gradient exchange is hidden (`Parallelism.gradient_overlap`).  Data loading, checkpoints, logging
and the planner take no time on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from libra.config import check_count
from libra.cost.arrays import Floats, check_array
from libra.cost.collectives import exchange_seconds, hop_seconds, ring_seconds
from libra.cost.hardware import Cluster
from libra.cost.memory import rank_parameters
from libra.cost.models import Model
from libra.cost.parallelism import Parallelism
from libra.cost.pipeline import simulate_schedule


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of one optimizer step."""

    free: float
    """All microbatches, where pools synchronise at the gradient reduction only."""

    lockstep: float
    """All microbatches, where all replicas synchronise at every accumulation index."""

    gradients: float
    """Reduce-scatter of gradients and all-gather of parameters, without their hidden share."""

    optimizer: float
    """Update of each rank's share of the parameters."""

    bubble_share: float
    """Share of the slowest pool's schedule in which a pipeline rank idles; 0 without stages."""

    tokens: int
    """Tokens of the step."""

    @property
    def seconds(self) -> float:
        """The step, where pools synchronise at the gradient reduction only."""
        return self.free + self.gradients + self.optimizer

    @property
    def lockstep_seconds(self) -> float:
        """The step, where all replicas synchronise at every index."""
        return self.lockstep + self.gradients + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole cluster."""
        return self.tokens / self.seconds


def step_seconds(
    model: Model,
    parallelism: Parallelism,
    cluster: Cluster,
    *,
    attention_forward: ArrayLike,
    attention_backward: ArrayLike,
    linear: ArrayLike = 1.0,
    pool_size: int = 1,
) -> StepSeconds:
    """Seconds of a step, from the seconds of its attention.

    `attention_forward` and `attention_backward` [GA, DP] are the seconds of one layer's attention,
    exchanges included, at the slowest worker of each replica, for each accumulation index.
    `linear` are the tokens of each pack over L, [GA, DP] or one for all (see `microbatch_seconds`).
    `pool_size` P joins contiguous replicas, which then wait for each other at every index; it must
    divide dp.  Raises ValueError.
    """
    shape = (parallelism.microbatches, parallelism.dp)
    check = partial(check_array, shape=shape, shape_from="global_batch and dp")
    forward = check("attention_forward", attention_forward)
    backward = check("attention_backward", attention_backward)
    check_count("pool_size", pool_size)
    if parallelism.dp % pool_size:
        raise ValueError(f"pool_size {pool_size} does not divide dp {parallelism.dp}")

    # Step 1: seconds of every model chunk, [chunks, GA, DP].
    tokens = np.broadcast_to(np.asarray(linear, dtype=np.float64), shape)
    chunks = microbatch_seconds(model, parallelism, cluster, (forward, backward), tokens)

    # Step 2: play the schedules of all pools, and of one pool of all replicas.  A pool's chunk
    # takes as long as that of its slowest replica: [chunks, GA, pools, P] to [chunks, GA, pools].
    free, lockstep = (
        simulate_schedule(
            parallelism.schedule,
            *(each.reshape(*each.shape[:2], -1, joined).max(axis=3) for each in chunks),
            ranks=parallelism.pp,
            hop_seconds=stage_seconds(model, parallelism, cluster),
        )
        for joined in (pool_size, parallelism.dp)
    )
    slowest = int(free.makespan.argmax())
    return StepSeconds(
        free=float(free.makespan[slowest]),
        lockstep=float(lockstep.makespan.max()),
        gradients=gradient_seconds(model, parallelism, cluster)
        * (1 - parallelism.gradient_overlap),
        optimizer=optimizer_seconds(model, parallelism, cluster),
        bubble_share=float(free.bubble_share[slowest]),
        tokens=parallelism.global_batch * parallelism.tokens,
    )


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
    attention: tuple[Floats, Floats],
    linear: Floats | float = 1.0,
) -> tuple[Floats, Floats]:
    """Forward and backward seconds of every model chunk, [chunks, ...] each.

    `attention` are one layer's seconds forward and backward, [...] each, exchanges included, for
    any number of microbatches.  `linear` are a microbatch's tokens over L, other than 1 where packs
    differ in length: all work but attention grows with them.  The last chunk has the output
    projection and the loss too.  The backward has the recomputed forward, where there is one.
    """
    # Step 1: every chunk's layers; all that is not attention grows with the tokens of the pack.
    layers = parallelism.chunk_layers(model)
    layer = layer_seconds(model, parallelism, cluster)
    once = layers * (attention[0] + linear * layer.forward)
    again = once if parallelism.recompute == "full" else 0.0
    twice = layers * (attention[1] + linear * layer.backward) + again
    forward, backward = (np.stack([each] * parallelism.chunks) for each in (once, twice))

    # Step 2: the output projection and the loss, in the last chunk.  They are never recomputed:
    # their backward follows their forward at once.
    output = output_seconds(model, parallelism, cluster)
    forward[-1] += linear * output.forward
    backward[-1] += linear * output.backward
    return forward, backward


def stage_seconds(model: Model, parallelism: Parallelism, cluster: Cluster) -> float:
    """The residual stream's way to the next pipeline stage, a replica's ranks away; 0 without
    stages.
    """
    if parallelism.pp == 1:
        return 0.0
    stream = parallelism.rows * model.hidden * parallelism.element_bytes / parallelism.tp
    stride = parallelism.tp * parallelism.cp * parallelism.dp
    return hop_seconds(stream, cluster, stride=stride)


def gradient_seconds(model: Model, parallelism: Parallelism, cluster: Cluster) -> float:
    """Reduce-scatter of gradients and all-gather of parameters on the slowest stage, all of it."""
    replicas, tp, ep = parallelism.cp * parallelism.dp, parallelism.tp, parallelism.ep
    moved = parallelism.gradient_bytes + parallelism.element_bytes
    seconds = []
    # Stages exchange gradients at the same time, in groups of their own: the slowest counts.
    for stage in range(parallelism.pp):
        mine = rank_parameters(model, parallelism, stage=stage)
        # Two collectives of half the bytes each: the sum is right, and latencies count twice.
        dense, routed = mine.dense * moved / 2, mine.routed * moved / 2
        one = ring_seconds(dense, replicas, cluster, stride=tp)
        if routed:
            one += ring_seconds(routed, replicas // ep, cluster, stride=tp * ep)
        seconds.append(2 * one)
    return max(seconds)


def optimizer_seconds(model: Model, parallelism: Parallelism, cluster: Cluster) -> float:
    """The optimizer on the slowest stage: it reads gradients and states, and writes states and
    parameters, at memory bandwidth.
    """
    # States are read and written; gradients are only read, parameters only written.
    touched = (
        parallelism.gradient_bytes + 2 * parallelism.optimizer_bytes + parallelism.element_bytes
    )
    stages = range(parallelism.pp)
    owned = max(rank_parameters(model, parallelism, stage=stage).owned for stage in stages)
    return owned * touched / cluster.memory_bandwidth
