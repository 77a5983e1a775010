"""Planning a pool: lengths and configuration in, a `PoolPlan` out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import HeadShape, PoolConfig, check_count
from libra.data.lengths import first_true
from libra.plan.geometry import pool_geometry
from libra.plan.head_groups import HeadGroups, cut_heads
from libra.plan.place_ulysses import check_ulysses, place_ulysses
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import keeps_limits

__all__ = ["PoolPlan", "cut_pool_heads", "plan_pool"]


def plan_pool(
    cu_seqlens_per_pack: Sequence[ArrayLike],
    *,
    cp_size: int,
    config: PoolConfig,
    heads: HeadShape,
    tokens: int | None = None,
    speeds: ArrayLike | None = None,
) -> PoolPlan:
    """Plan the attention of one pool: which worker computes which tile, and what travels.

    `cu_seqlens_per_pack` holds one int array a pack, [samples + 1] from 0; `tokens` is L where
    packs end in padding (None: all packs end at the same token).  `speeds` holds a positive number
    a worker, [P * CP], by which its target scales; only their ratios count, to a thousandth of the
    mean.  Pure and deterministic: the same arguments give the same plan everywhere.

    Raises ValueError for lengths that don't fit, heads that don't divide by H and M, a pool of
    other than P packs, or speeds that are not one a worker, finite and > 0.
    """
    if len(cu_seqlens_per_pack) != config.pool_size:
        raise ValueError(
            f"{len(cu_seqlens_per_pack)} packs for a pool of pool_size={config.pool_size}; give "
            "one cu_seqlens a replica"
        )
    check_count("cp_size", cp_size)
    if tokens is not None:
        check_count("tokens", tokens)
    shards = cut_pool_heads(heads, config, cp_size).shards
    geometry = pool_geometry(
        cu_seqlens_per_pack, cp_size=cp_size, layout=config.shard_layout, tokens=tokens
    )
    uncut = PoolPlan(
        geometry=geometry,
        config=config,
        heads=heads,
        shards=shards,
        assignment=np.repeat(geometry.block_worker, shards).astype(np.int32),
        speeds=None if speeds is None else _relative(speeds, config, geometry.workers),
    )
    if config.placement == "ulysses":
        return place_ulysses(uncut)
    from libra.plan.place_paper import place_paper  # imports numba, which takes half a second

    return place_paper(uncut) if config.placement == "paper" else _surplus(uncut)


def cut_pool_heads(heads: HeadShape, config: PoolConfig, cp_size: int) -> HeadGroups:
    """The cut of heads that a configuration asks for; Ulysses always has one shard a CP rank.
    Raises ValueError where heads don't divide.
    """
    if config.placement != "ulysses":
        return cut_heads(heads, config.head_shards, config.chunks)
    check_ulysses(heads, cp_size)
    return cut_heads(heads, cp_size, config.chunks)


def _surplus(uncut: PoolPlan) -> PoolPlan:
    """Tiles at home but the surplus, or whole tiles where they balance better within the limits."""
    from libra.plan.place_paper import place_paper  # both import numba
    from libra.plan.place_surplus import place_surplus

    best = place_surplus(uncut)
    if best.imbalance <= uncut.config.tolerance:
        return best
    # Too few rows to cut finer.  Workers of a node first may leave room in small parts, which the
    # other order, or whole tiles, can use.
    other = place_surplus(uncut, node_local_first=False)
    best = min(best, other, key=lambda plan: plan.imbalance)
    if uncut.speeds is None:
        whole_tiles = place_paper(uncut)
        if whole_tiles.imbalance < best.imbalance and keeps_limits(whole_tiles, best):
            return whole_tiles
    return best


def _relative(speeds: ArrayLike, config: PoolConfig, workers: int) -> NDArray[np.int64]:
    """Speeds in thousandths of their mean, at least 1; int64 [workers]."""
    if config.placement != "surplus":
        raise ValueError(
            f"speeds need placement='surplus'; PoolConfig.placement is {config.placement!r}"
        )
    try:
        if np.iscomplexobj(speeds):
            raise ValueError("they are complex")
        given = np.asarray(speeds, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"speeds must be numbers: {error}") from error
    if given.shape != (workers,):
        raise ValueError(
            f"speeds have shape {given.shape}; give one number a worker, shape ({workers},)"
        )
    if (i := first_true(~(np.isfinite(given) & (given > 0)))) is not None:
        raise ValueError(f"speeds[{i}] is {given[i]}; it must be finite and > 0")
    given = given / given.max()  # so that their mean can't overflow
    relative: NDArray[np.int64] = np.rint(1000 * given / given.mean()).astype(np.int64)
    return np.maximum(relative, 1)
