"""What each way to balance attention makes of one window, in predicted seconds.

    ulysses    packs in sampler order, each on its own CP group: heads over the group
    wlb        samples packed again by cost, packs of unequal tokens; then Ulysses
    cluster    one pool of all replicas, packs in sampler order, with the pipeliner
    tap        pools of P neighbours in sampler order, tiles placed; no overlap
    tap_vrsp   pools dealt by VRSP, tiles placed; no overlap
    libra      the same with the pipeliner, pools refined and grouped
    ideal      all attention of the window spread evenly over all workers, nothing moves

All but Ulysses and WLB use the placement of the configuration given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.packing import Packs
from libra.placement import contiguous_pools, place_packs
from libra.plan.plan import plan_pool
from libra.refinement import order_pools, refine_pools
from libra.simulate.attention_time import AttentionTime
from libra.simulate.cost.microbatch import layer_seconds
from libra.simulate.cost.models import Model
from libra.simulate.cost.parallelism import Parallelism
from libra.simulate.cost.step import StepSeconds, step_seconds
from libra.simulate.wlb import pack_by_cost
from libra.workload import causal_pairs

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SCHEMES: Final[Mapping[str, str]] = {
    "ulysses": "Ulysses",
    "wlb": "WLB-LLM style packing",
    "cluster": "cluster-wide pool",
    "tap": "TAP",
    "tap_vrsp": "TAP + VRSP",
    "libra": "Libra",
    "ideal": "ideal",
}
"""Key and name of every scheme."""

_MOST_PLANNED: Final = 1024
"""Workers of the largest pool that is planned: traffic is a matrix of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all schemes share."""

    model: Model
    parallelism: Parallelism
    time: AttentionTime
    config: PoolConfig
    """Libra's; P, B and H are the ones to compare."""

    most_tokens: float = 1.5
    """Most tokens of a pack that WLB style packing makes, over L.  Default: an assumption, what
    memory leaves beside packs of L tokens.
    """

    @property
    def heads(self) -> HeadShape:
        """Heads of one tensor-parallel rank."""
        return self.model.heads(tp=self.parallelism.tp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchemeTimes:
    """One layer's attention in every microbatch of a step, [GA, DP] each, seconds."""

    forward: FloatArray
    """Until the slowest worker of the replica's pool has all that it gets."""
    backward: FloatArray
    compute: FloatArray
    """Both passes' attention of the busiest worker of the replica's pool."""
    linear: FloatArray
    """Tokens of the pack over L."""
    pool_size: int
    """Replicas that wait for each other at every index."""

    def step(self, setting: Setting) -> StepSeconds:
        """The step that these microbatches make."""
        return step_seconds(
            setting.model,
            setting.parallelism,
            setting.time.cluster,
            attention_forward=self.forward,
            attention_backward=self.backward,
            linear=self.linear,
            pool_size=self.pool_size,
        )


def scheme_times(packs: Packs, setting: Setting, scheme: str) -> SchemeTimes | None:
    """One scheme on one window of GBS packs; None where its pools are too large to plan.

    Raises ValueError for an unknown scheme, and for a window or configuration that doesn't fit.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; choose one of {', '.join(SCHEMES)}")
    if len(packs) != setting.parallelism.global_batch:
        raise ValueError(
            f"a window of {len(packs)} packs for global_batch={setting.parallelism.global_batch}"
        )
    if scheme == "ulysses":
        return _replicas(list(packs), packs.tokens, setting)
    if scheme == "wlb":
        return _wlb(packs, setting)
    if scheme == "ideal":
        return _ideal(packs, setting)
    return _pooled(packs, setting, scheme)


def ulysses_seconds(lengths: IntArray, tokens: int, setting: Setting) -> dict[str, float]:
    """Attention of one pack on its own CP group; figures of `AttentionTime`."""
    plan = plan_pool(
        [np.append(0, np.cumsum(lengths))],
        cp_size=setting.parallelism.cp,
        config=ulysses_config(setting.config),
        heads=setting.heads,
        tokens=tokens,
    )
    return setting.time(plan)


def ulysses_config(config: PoolConfig) -> PoolConfig:
    """The baseline beside a configuration: same shards, nothing overlaps."""
    return PoolConfig(
        pool_size=1,
        placement="ulysses",
        chunks=1,
        shard_layout=config.shard_layout,
        backward=config.backward,
        ranks_per_node=config.ranks_per_node,
    )


def _replicas(packs: Sequence[IntArray], tokens: int, setting: Setting) -> SchemeTimes:
    """Every pack on its own CP group, in the order given."""
    ends = [int(lengths.sum()) for lengths in packs]
    found = [
        ulysses_seconds(lengths, max(tokens, end), setting)
        for lengths, end in zip(packs, ends, strict=True)
    ]
    return _table(found, 1, setting, np.ones(len(packs)))


def _wlb(packs: Packs, setting: Setting) -> SchemeTimes:
    parallelism, tokens = setting.parallelism, packs.tokens
    linear = layer_seconds(setting.model, parallelism, setting.time.cluster)
    pairs = float(causal_pairs(0, tokens))
    one = ulysses_seconds(np.array([tokens]), tokens, setting)["mean_compute_seconds"]
    a_pair = one / pairs / 2  # of l^2, which is two pairs
    a_token = (linear.forward + linear.backward) / tokens
    packed = pack_by_cost(
        packs.lengths,
        len(packs),
        int(setting.most_tokens * tokens),
        linear_tokens=a_token / a_pair,
    )
    ends = [int(lengths.sum()) for lengths in packed]
    found = [
        ulysses_seconds(lengths, -(-end // parallelism.cp) * parallelism.cp, setting)
        if end
        else dict.fromkeys(_FIGURES, 0.0)
        for lengths, end in zip(packed, ends, strict=True)
    ]
    return _table(found, 1, setting, np.array(ends) / tokens)


def _ideal(packs: Packs, setting: Setting) -> SchemeTimes:
    """The work of Ulysses, without its transfers, spread over all."""
    ulysses = [ulysses_seconds(lengths, packs.tokens, setting) for lengths in packs]
    compute = float(np.mean([each["mean_compute_seconds"] for each in ulysses]))
    # How Ulysses divides its seconds between the passes, transfers left out.
    whole = np.array([packs.tokens], dtype=np.int64)
    table = setting.time.table
    heads = max(1, setting.heads.q // setting.parallelism.cp)
    forward, backward = (
        float(table.seconds(whole, whole, heads, direction=direction)[0])
        for direction in ("forward", "backward")
    )
    share = forward / (forward + backward)
    found = {
        "forward_seconds": share * compute,
        "backward_seconds": (1 - share) * compute,
        "compute_seconds": compute,
    }
    return _table([found] * len(packs), 1, setting, np.ones(len(packs)))


def _pooled(packs: Packs, setting: Setting, scheme: str) -> SchemeTimes | None:
    parallelism = setting.parallelism
    size = parallelism.dp if scheme == "cluster" else min(setting.config.pool_size, parallelism.dp)
    if size * parallelism.cp > _MOST_PLANNED:
        return None
    weights = packs.workloads
    if scheme in ("cluster", "tap"):
        pools = contiguous_pools(len(packs), size)
    elif scheme == "tap_vrsp":
        pools = place_packs(weights, size)
    else:
        pools = refine_pools(weights, place_packs(weights, size))
        pools = order_pools(weights, pools, parallelism.dp // size, "grouped")
    config = setting.config.replace(pool_size=size)
    overlap = scheme in ("cluster", "libra")
    time = AttentionTime(
        cluster=setting.time.cluster, table=setting.time.table, tp=setting.time.tp, overlap=overlap
    )
    found = [
        time(
            plan_pool(
                [packs.cu_seqlens(pack) for pack in pool],
                cp_size=parallelism.cp,
                config=config,
                heads=setting.heads,
                tokens=packs.tokens,
            )
        )
        for pool in pools.tolist()
    ]
    return _table(found, size, setting, np.ones(len(packs)))


_FIGURES: Final = ("forward_seconds", "backward_seconds", "compute_seconds")


def _table(
    found: Sequence[Mapping[str, float]], pool_size: int, setting: Setting, linear: FloatArray
) -> SchemeTimes:
    """Figures of pools in emission order as [GA, DP]."""
    shape = (setting.parallelism.microbatches, setting.parallelism.dp)
    forward, backward, compute = (
        np.repeat([each[name] for each in found], pool_size).reshape(shape) for name in _FIGURES
    )
    return SchemeTimes(
        forward=forward,
        backward=backward,
        compute=compute,
        linear=linear.reshape(shape),
        pool_size=pool_size,
    )
