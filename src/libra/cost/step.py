"""Seconds of an optimizer step from the attention of its microbatches.

Where ranks wait for each other:

- The members of a pool meet in every attention layer.  At each accumulation index a pool, and with
  it each of its P replicas, takes as long as its slowest worker.
- Pools do not meet.  Without expert parallelism across them, a pool goes on to its next index as
  soon as it is done, and pools meet only when gradients are reduced: the step takes as long as the
  pool with the greatest *sum* over indices (with pipeline stages: the longest schedule).
- Where something else joins all replicas at every index (experts spread over all of them, or the
  paper's attention benchmark, which ends each index with a barrier) the step takes the sum over
  indices of the *slowest* pool: `lockstep`.

Both are given.  Without pools (Ulysses) a replica is a pool of its own.

Then come the gradients' reduce-scatter, the optimizer on each rank's share (read and written at
memory bandwidth) and the all-gather of new parameters.

What is simplified.  All layers of a microbatch take the same time.  A stated share of the gradient
exchange is hidden (`Parallelism.gradient_overlap`).  Data loading, checkpoints, logging and the
planner take no time on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.cost.checks import check_count
from libra.cost.hardware import Cluster
from libra.cost.memory import rank_parameters
from libra.cost.microbatch import microbatch_seconds
from libra.cost.models import Model
from libra.cost.parallelism import Parallelism
from libra.cost.pipeline import Schedule, simulate_schedule
from libra.cost.transfers import hop_seconds, ring_seconds

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of one optimizer step."""

    free: float
    """All microbatches, where pools meet at the gradient reduction only."""

    lockstep: float
    """All microbatches, where all replicas meet at every accumulation index."""

    attention: float
    """The attention benchmark: over the indices, the sum of the slowest replica's attention in one
    layer, forward and backward, without recomputation.
    """

    gradients: float
    """Reduce-scatter of gradients and all-gather of parameters, as far as not hidden."""

    optimizer: float
    """Update of each rank's share of the parameters."""

    bubble_share: float
    """Share of the slowest pool's schedule in which a pipeline rank idles; 0 without stages."""

    tokens: int
    """Tokens of the step."""

    @property
    def seconds(self) -> float:
        """The step, where pools meet at the gradient reduction only."""
        return self.free + self.gradients + self.optimizer

    @property
    def lockstep_seconds(self) -> float:
        """The step, where all replicas meet at every index."""
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
    """Compose a step.

    `attention_forward` and `attention_backward` [GA, DP] are the seconds that attention, exchanges
    included, takes the slowest worker of each replica in one layer, at each accumulation index.
    `linear` are the tokens of each pack over L, [GA, DP] or one for all (see `microbatch_seconds`).
    `pool_size` P joins contiguous replicas, which then wait for each other at every index; it must
    divide dp.  Raises ValueError.
    """
    shape = (parallelism.microbatches, parallelism.dp)
    forward = _check_attention("attention_forward", attention_forward, shape)
    backward = _check_attention("attention_backward", attention_backward, shape)
    check_count("pool_size", pool_size)
    if parallelism.dp % pool_size:
        raise ValueError(f"pool_size {pool_size} does not divide dp {parallelism.dp}")

    share = np.broadcast_to(np.asarray(linear, dtype=np.float64), shape)
    free = _schedule(model, parallelism, cluster, forward, backward, share, pool_size)
    lockstep = _schedule(model, parallelism, cluster, forward, backward, share, parallelism.dp)
    slowest = int(free.makespan.argmax())
    return StepSeconds(
        free=float(free.makespan[slowest]),
        lockstep=float(lockstep.makespan.max()),
        attention=float(forward.max(axis=1).sum() + backward.max(axis=1).sum()),
        gradients=gradient_seconds(model, parallelism, cluster)
        * (1 - parallelism.gradient_overlap),
        optimizer=optimizer_seconds(model, parallelism, cluster),
        bubble_share=float(free.bubble_share[slowest]),
        tokens=parallelism.global_batch * parallelism.tokens,
    )


def step_schedule(
    model: Model,
    parallelism: Parallelism,
    cluster: Cluster,
    *,
    attention_forward: ArrayLike,
    attention_backward: ArrayLike,
) -> Schedule:
    """The pipeline schedule of one replica or pool, to be drawn: its attention seconds are [GA]."""
    shape = (parallelism.microbatches,)
    forward = _check_attention("attention_forward", attention_forward, shape)
    backward = _check_attention("attention_backward", attention_backward, shape)
    return _schedule(model, parallelism, cluster, forward, backward, np.ones(shape), None)


def gradient_seconds(model: Model, parallelism: Parallelism, cluster: Cluster) -> float:
    """Reduce-scatter of gradients and all-gather of parameters on the slowest stage, all of it."""
    replicas, tp, ep = parallelism.cp * parallelism.dp, parallelism.tp, parallelism.ep
    moved = parallelism.gradient_bytes + parallelism.element_bytes
    seconds = []
    for stage in range(parallelism.pp):
        mine = rank_parameters(model, parallelism, stage=stage)
        # Two collectives; their bytes may be added, their latencies count twice.
        dense = 2 * ring_seconds(mine.dense * moved / 2, replicas, cluster, stride=tp)
        routed = 0.0
        if mine.routed:
            routed = 2 * ring_seconds(
                mine.routed * moved / 2, replicas // ep, cluster, stride=tp * ep
            )
        seconds.append(dense + routed)
    return max(seconds)


def optimizer_seconds(model: Model, parallelism: Parallelism, cluster: Cluster) -> float:
    """Reads gradients and states, writes states and parameters; on the slowest stage."""
    replicas = parallelism.cp * parallelism.dp
    touched = (
        parallelism.gradient_bytes + 2 * parallelism.optimizer_bytes + parallelism.element_bytes
    )
    owned = []
    for stage in range(parallelism.pp):
        mine = rank_parameters(model, parallelism, stage=stage)
        owned.append(mine.dense / replicas + mine.routed * parallelism.ep / replicas)
    return max(owned) * touched / cluster.memory_bandwidth


def _schedule(
    model: Model,
    parallelism: Parallelism,
    cluster: Cluster,
    forward: Seconds,
    backward: Seconds,
    linear: Seconds,
    pool_size: int | None,
) -> Schedule:
    """The schedules of all pools from attention seconds [GA, DP], or of one replica from [GA].

    One stage: a plain sum.
    """
    inner, last = (
        microbatch_seconds(
            model,
            parallelism,
            cluster,
            attention_forward=forward,
            attention_backward=backward,
            linear=linear,
            last=ends,
        )
        for ends in (False, True)
    )

    def joined(times: Seconds) -> Seconds:
        return times if pool_size is None else _slowest(times, pool_size)

    before = parallelism.chunks - 1
    stride = parallelism.tp * parallelism.cp * parallelism.dp
    stream = parallelism.rows * model.hidden * parallelism.element_bytes / parallelism.tp
    return simulate_schedule(
        parallelism.schedule,
        np.stack([joined(chunk.forward) for chunk in (*[inner] * before, last)]),
        np.stack([joined(chunk.backward) for chunk in (*[inner] * before, last)]),
        ranks=parallelism.pp,
        hop_seconds=hop_seconds(stream, cluster, stride=stride) if parallelism.pp > 1 else 0.0,
    )


def _slowest(times: Seconds, pool_size: int) -> Seconds:
    """The slowest of every `pool_size` contiguous replicas, [GA, pools]."""
    pools = times.reshape(len(times), -1, pool_size)
    return np.asarray(pools.max(axis=2))


def _check_attention(name: str, values: ArrayLike, shape: tuple[int, ...]) -> Seconds:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}; global_batch, dp and the schedule make it {shape}"
        )
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(f"{name} must hold finite seconds >= 0")
    return array
