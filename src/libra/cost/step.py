"""Seconds of an optimizer step from the attention of its microbatches.

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

Simplifications.  All layers of a microbatch take the same time.  A stated share of the gradient
exchange is hidden (`Parallelism.gradient_overlap`).  Data loading, checkpoints, logging and the
planner take no time on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from libra.cost.arrays import check_array
from libra.cost.collectives import hop_seconds, ring_seconds
from libra.cost.hardware import Cluster
from libra.cost.memory import rank_parameters
from libra.cost.microbatch import microbatch_seconds
from libra.cost.models import Model
from libra.cost.parallelism import Parallelism
from libra.cost.pipeline import simulate_schedule
from libra.data.lengths import check_count


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
    chunks = microbatch_seconds(
        model,
        parallelism,
        cluster,
        attention_forward=forward,
        attention_backward=backward,
        linear=np.broadcast_to(np.asarray(linear, dtype=np.float64), shape),
    )

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
