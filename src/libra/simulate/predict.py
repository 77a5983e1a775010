"""Predicted attention seconds of one layer on one window of packs, for every scheme.

    window ──> pools (schemes.py) ──> plan_pool ──> AttentionTime ──> WindowSeconds ──> step

All schemes but Ulysses, WLB and the ideal use the placement of the configuration given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.baselines.wlb import WlbConfig, pack_by_cost
from libra.config import HeadShape, PoolConfig, check_choice, ulysses_baseline
from libra.cost.attention_time import AttentionCost, AttentionTime
from libra.cost.kernel_table import DIRECTIONS
from libra.cost.models import Model
from libra.cost.parallelism import Parallelism
from libra.cost.step import StepSeconds, layer_seconds, step_seconds
from libra.data.lengths import IntArray
from libra.data.packing import Packs
from libra.plan.plan_pool import plan_pool
from libra.plan.pool_plan import PoolPlan
from libra.simulate.schemes import PREDICTED, SCHEMES, Scheme

FloatArray = NDArray[np.float64]

_MOST_PLANNED: Final = 1024
"""Workers of the largest pool that is planned: traffic is a matrix of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that schemes and candidates share."""

    model: Model
    parallelism: Parallelism
    time: AttentionTime
    config: PoolConfig
    """Libra's configuration; a candidate has its own P, B and H."""

    @property
    def heads(self) -> HeadShape:
        """Heads of one tensor-parallel rank."""
        return self.model.heads(tp=self.parallelism.tp)

    def plan(self, packs: Iterable[IntArray], tokens: int, config: PoolConfig) -> PoolPlan:
        """The plan of one pool: `packs` gives the sample lengths of each of its packs."""
        return plan_pool(
            [np.append(0, np.cumsum(lengths)) for lengths in packs],
            cp_size=self.parallelism.cp,
            config=config,
            heads=self.heads,
            tokens=tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowSeconds:
    """One layer's attention in every pool of a window, in the order of emission, in seconds.

    Without pools a pack is a pool of its own.
    """

    forward: FloatArray
    """Until the pool's slowest worker has all its results, [pools]."""
    backward: FloatArray
    """The same of the backward pass, [pools]."""
    compute: FloatArray
    """Attention of the busiest worker in both passes, [pools]."""
    linear: FloatArray
    """Tokens of the pool's packs over L, [pools]."""
    pool_size: int
    """Replicas of a pool."""

    @staticmethod
    def of_pools(
        costs: Sequence[AttentionCost], *, pool_size: int = 1, linear: ArrayLike = 1.0
    ) -> WindowSeconds:
        """From the cost of every pool."""
        return WindowSeconds(
            forward=np.array([each.forward_seconds for each in costs]),
            backward=np.array([each.backward_seconds for each in costs]),
            compute=np.array([each.compute_seconds for each in costs]),
            linear=np.broadcast_to(np.asarray(linear, dtype=np.float64), len(costs)),
            pool_size=pool_size,
        )

    @property
    def exposed_share(self) -> float:
        """Share of both passes in which the busiest workers of the pools do not compute."""
        spent = float(self.forward.sum() + self.backward.sum())
        return 1 - float(self.compute.sum()) / spent if spent else 0.0

    def replicas(self, values: FloatArray, parallelism: Parallelism) -> FloatArray:
        """`values` [pools] for each microbatch of a step, [GA, DP]."""
        shape = (parallelism.microbatches, parallelism.dp)
        # Pools of two, DP 4, GA 2: a b c d  ->  a a b b | c c d d.
        return np.repeat(values, self.pool_size).reshape(shape)

    def take(self, chosen: IntArray) -> WindowSeconds:
        """Those of some pools, in the order given and as often as named."""
        arrays = ("forward", "backward", "compute", "linear")
        return replace(self, **{name: getattr(self, name)[chosen] for name in arrays})

    def step(self, setting: Setting) -> StepSeconds:
        """The optimizer step that these pools make."""
        spread = setting.parallelism
        return step_seconds(
            setting.model,
            spread,
            setting.time.cluster,
            attention_forward=self.replicas(self.forward, spread),
            attention_backward=self.replicas(self.backward, spread),
            linear=self.replicas(self.linear, spread),
            pool_size=self.pool_size,
        )


def scheme_seconds(packs: Packs, setting: Setting, key: str) -> WindowSeconds | None:
    """One scheme on one window of GBS packs; None where its pools are too large to plan.

    Raises ValueError for an unknown scheme, and for a window or configuration that doesn't fit.
    """
    check_choice("scheme", key, PREDICTED)
    if len(packs) != setting.parallelism.global_batch:
        raise ValueError(
            f"a window of {len(packs)} packs for global_batch={setting.parallelism.global_batch}"
        )
    scheme = SCHEMES[key]
    if scheme.packing == "by-cost":
        return _repacked_seconds(packs, setting)
    if scheme.placement == "tiles":
        return _pooled_seconds(packs, setting, scheme)
    ulysses = ulysses_seconds(packs, setting)
    if scheme.placement == "ideal":
        return ideal_seconds(ulysses, packs.tokens, setting)
    return ulysses


def ulysses_seconds(packs: Packs, setting: Setting) -> WindowSeconds:
    """Every pack on its own CP group, for any number of packs."""
    return WindowSeconds.of_pools([_ulysses_cost(each, packs.tokens, setting) for each in packs])


def _ulysses_cost(lengths: IntArray, tokens: int, setting: Setting) -> AttentionCost:
    """Attention of one pack of `tokens` tokens, padding included, on its own CP group."""
    return setting.time(setting.plan([lengths], tokens, ulysses_baseline(setting.config)))


def _repacked_seconds(packs: Packs, setting: Setting) -> WindowSeconds:
    """The window's samples packed again by cost, each pack on its own CP group."""
    tokens, cp = packs.tokens, setting.parallelism.cp
    # Step 1: the prices of packing.  A sample of l tokens costs l^2 query-key pairs and l tokens of
    # the linear layers; both prices are taken from one sample that fills a pack.
    whole = _ulysses_cost(np.array([tokens]), tokens, setting)
    a_pair = whole.mean_compute_seconds / tokens**2
    layer = layer_seconds(setting.model, setting.parallelism, setting.time.cluster)
    a_token = (layer.forward + layer.backward) / tokens
    config = WlbConfig(linear_tokens=a_token / a_pair)
    packed = pack_by_cost(packs.lengths, len(packs), tokens, config)
    # Step 2: each pack padded to a multiple of cp, a pack without samples too.
    lengths = [packs.lengths[pack] for pack in packed]
    ends = np.array([pack.sum() for pack in lengths])
    padded = -(-np.maximum(ends, 1) // cp) * cp
    costs = [
        _ulysses_cost(pack, rows, setting)
        for pack, rows in zip(lengths, padded.tolist(), strict=True)
    ]
    return WindowSeconds.of_pools(costs, linear=ends / tokens)


def ideal_seconds(ulysses: WindowSeconds, tokens: int, setting: Setting) -> WindowSeconds:
    """The work of Ulysses, whose workers share a pack equally, spread over all; nothing moves."""
    # Step 1: every worker computes as long as the mean one.
    compute = np.full_like(ulysses.compute, ulysses.compute.mean())
    heads = max(1, setting.heads.q // setting.parallelism.cp)
    # Step 2: both passes share that time as they do for one sample that fills a pack.
    table = setting.time.table
    forward, backward = (
        float(table.seconds(tokens, tokens, heads, direction=each)) for each in DIRECTIONS
    )
    share = forward / (forward + backward)
    return replace(
        ulysses, forward=share * compute, backward=(1 - share) * compute, compute=compute
    )


def _pooled_seconds(packs: Packs, setting: Setting, scheme: Scheme) -> WindowSeconds | None:
    """Pools of several replicas.  Without overlap the same chunks run one after the other."""
    parallelism = setting.parallelism
    size = scheme.pool_size(setting.config.pool_size, parallelism.dp)
    if size * parallelism.cp > _MOST_PLANNED:
        return None
    time = replace(setting.time, overlap=scheme.overlap)
    config = setting.config.replace(pool_size=size)
    pools = scheme.pools(packs.workloads, size, parallelism.dp // size)
    costs = [
        time(setting.plan(map(packs.lengths_of, pool), packs.tokens, config)) for pool in pools
    ]
    return WindowSeconds.of_pools(costs, pool_size=size)
