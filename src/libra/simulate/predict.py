"""Predicted attention seconds of one layer, for every scheme, on one window.

All schemes but Ulysses, WLB and the ideal use the placement of the configuration given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.baselines.wlb import MOST_TOKENS, pack_by_cost
from libra.config import HeadShape, PoolConfig, ulysses_beside
from libra.cost.attention_time import AttentionTime
from libra.cost.microbatch import layer_seconds
from libra.cost.models import Model
from libra.cost.parallelism import Parallelism
from libra.cost.step import StepSeconds, step_seconds
from libra.data.packing import Packs
from libra.plan.plan_pool import plan_pool
from libra.simulate.schemes import PREDICTED, Scheme, find_scheme

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

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

    most_tokens: float = MOST_TOKENS
    """Most tokens of a pack that WLB style packing makes, over L."""

    @property
    def heads(self) -> HeadShape:
        """Heads of one tensor-parallel rank."""
        return self.model.heads(tp=self.parallelism.tp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchemeFigures:
    """One layer's attention in every pool of a window, in the order of emission, seconds.

    Without pools a pack is a pool of its own.
    """

    forward: FloatArray
    """Until the pool's slowest worker has all that it gets, [pools]."""
    backward: FloatArray
    compute: FloatArray
    """Both passes' attention of the busiest worker."""
    linear: FloatArray
    """Tokens of the pool's packs over L."""
    pool_size: int

    def replicas(self, values: FloatArray, parallelism: Parallelism) -> FloatArray:
        """One of these figures for each microbatch of a step, [GA, DP]."""
        shape = (parallelism.microbatches, parallelism.dp)
        return np.repeat(values, self.pool_size).reshape(shape)

    def take(self, chosen: IntArray) -> SchemeFigures:
        """Those of some pools, in the order given and as often as named."""
        return replace(
            self,
            forward=self.forward[chosen],
            backward=self.backward[chosen],
            compute=self.compute[chosen],
            linear=self.linear[chosen],
        )

    def step(self, setting: Setting) -> StepSeconds:
        """The step that these pools make."""
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


def scheme_figures(packs: Packs, setting: Setting, key: str) -> SchemeFigures | None:
    """One scheme on one window of GBS packs; None where its pools are too large to plan.

    Raises ValueError for an unknown scheme, and for a window or configuration that doesn't fit.
    """
    scheme = find_scheme(key, PREDICTED)
    if len(packs) != setting.parallelism.global_batch:
        raise ValueError(
            f"a window of {len(packs)} packs for global_batch={setting.parallelism.global_batch}"
        )
    if scheme.packing == "by-cost":
        return _repacked(packs, setting)
    if scheme.placement == "tiles":
        return _pooled(packs, setting, scheme)
    ulysses = ulysses_figures(packs, setting)
    if scheme.placement == "ideal":
        return ideal_figures(ulysses, packs.tokens, setting)
    return ulysses


def ulysses_figures(packs: Packs, setting: Setting) -> SchemeFigures:
    """Every pack on its own CP group, any number of packs."""
    return _figures([ulysses_seconds(lengths, packs.tokens, setting) for lengths in packs])


def ulysses_seconds(lengths: IntArray, tokens: int, setting: Setting) -> dict[str, float]:
    """Attention of one pack on its own CP group; figures of `AttentionTime`."""
    if not len(lengths):
        return dict.fromkeys((*_FIGURES, "mean_compute_seconds"), 0.0)
    plan = plan_pool(
        [np.append(0, np.cumsum(lengths))],
        cp_size=setting.parallelism.cp,
        config=ulysses_beside(setting.config),
        heads=setting.heads,
        tokens=tokens,
    )
    return setting.time(plan)


def _repacked(packs: Packs, setting: Setting) -> SchemeFigures:
    """The window's samples packed again by cost, each pack on its own CP group."""
    tokens, cp = packs.tokens, setting.parallelism.cp
    one = ulysses_seconds(np.array([tokens]), tokens, setting)["mean_compute_seconds"]
    a_key = one / tokens**2  # a query and key of a sample of l tokens, of which there are l^2
    linear = layer_seconds(setting.model, setting.parallelism, setting.time.cluster)
    a_token = (linear.forward + linear.backward) / tokens
    packed = pack_by_cost(
        packs.lengths,
        len(packs),
        int(setting.most_tokens * tokens),
        linear_tokens=a_token / a_key,
    )
    held = [packs.lengths[pack] for pack in packed]
    ends = np.array([lengths.sum() for lengths in held])
    found = [
        ulysses_seconds(lengths, -(-int(end) // cp) * cp, setting)
        for lengths, end in zip(held, ends, strict=True)
    ]
    return _figures(found, linear=ends / tokens)


def ideal_figures(ulysses: SchemeFigures, tokens: int, setting: Setting) -> SchemeFigures:
    """The work of Ulysses, whose workers share a pack equally, spread over all; nothing moves."""
    compute = np.full_like(ulysses.compute, ulysses.compute.mean())
    heads = max(1, setting.heads.q // setting.parallelism.cp)
    forward, backward = (
        float(setting.time.table.seconds(tokens, tokens, heads, direction=direction))
        for direction in ("forward", "backward")
    )
    share = forward / (forward + backward)
    return replace(
        ulysses, forward=share * compute, backward=(1 - share) * compute, compute=compute
    )


def _pooled(packs: Packs, setting: Setting, scheme: Scheme) -> SchemeFigures | None:
    """Pools of several replicas.  Without overlap the same chunks run one after the other."""
    parallelism = setting.parallelism
    size = scheme.pool_size(setting.config.pool_size, parallelism.dp)
    if size * parallelism.cp > _MOST_PLANNED:
        return None
    pools = scheme.pools(packs.workloads, size, parallelism.dp // size)
    time = replace(setting.time, overlap=scheme.overlap)
    config = setting.config.replace(pool_size=size)
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
    return _figures(found, pool_size=size)


_FIGURES: Final = ("forward_seconds", "backward_seconds", "compute_seconds")


def _figures(
    found: Sequence[Mapping[str, float]], *, pool_size: int = 1, linear: FloatArray | None = None
) -> SchemeFigures:
    forward, backward, compute = (np.array([each[name] for each in found]) for name in _FIGURES)
    return SchemeFigures(
        forward=forward,
        backward=backward,
        compute=compute,
        linear=np.ones(len(found)) if linear is None else linear,
        pool_size=pool_size,
    )
