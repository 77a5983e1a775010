"""Planning a pool: lengths and configuration in, a `PoolPlan` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import HeadShape, PoolConfig
from libra.data.lengths import check_count, check_cu_seqlens
from libra.plan.geometry import Geometry, pool_geometry
from libra.plan.head_groups import cut_heads
from libra.plan.place_ulysses import check_ulysses, place_ulysses
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import keeps_limits

__all__ = ["PoolPlan", "head_shards", "plan_pool"]


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
    if config.placement == "ulysses":
        check_ulysses(heads, cp_size)
    shards = head_shards(config, cp_size)
    cut_heads(heads, shards, config.chunks)  # refuses heads that don't divide, before any work
    bounds = tuple(check_cu_seqlens(cu, tokens=tokens) for cu in cu_seqlens_per_pack)
    relative = None if speeds is None else _relative(speeds, config, len(bounds) * cp_size)
    pool = _Pool(
        cu_seqlens=bounds,
        tokens=tokens,
        cp_size=cp_size,
        config=config,
        heads=heads,
        shards=shards,
        speeds=relative,
    )
    if config.placement == "ulysses":
        geometry = pool.geometry()
        return pool.plan(geometry, place_ulysses(geometry), shards)
    if config.placement == "paper":
        return _plan_paper(pool)
    return _plan_surplus(pool)


def head_shards(config: PoolConfig, cp_size: int) -> int:
    """H in force: Ulysses always has one shard a CP rank."""
    return cp_size if config.placement == "ulysses" else config.head_shards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pool:
    """The checked arguments of a plan."""

    cu_seqlens: tuple[NDArray[np.int64], ...]
    tokens: int | None
    cp_size: int
    config: PoolConfig
    heads: HeadShape
    shards: int
    speeds: NDArray[np.int64] | None

    def geometry(self, block_size: int | None = None) -> Geometry:
        """The pool in blocks of at most `block_size` tokens; None cuts only between workers."""
        return pool_geometry(
            self.cu_seqlens,
            cp_size=self.cp_size,
            block_size=block_size,
            layout=self.config.shard_layout,
            tokens=self.tokens,
        )

    def plan(self, geometry: Geometry, assignment: NDArray[np.int32], shards: int) -> PoolPlan:
        """The plan of an assignment of tiles."""
        return PoolPlan(
            cu_seqlens=self.cu_seqlens,
            geometry=geometry,
            config=self.config,
            heads=self.heads,
            shards=shards,
            assignment=assignment,
            speeds=self.speeds,
        )


def _plan_paper(pool: _Pool) -> PoolPlan:
    from libra.plan.place_paper import place_paper  # imports numba, which takes half a second

    geometry = pool.geometry(pool.config.block_size)
    assignment = place_paper(geometry, pool.heads, pool.shards, pool.config.tolerance)
    return pool.plan(geometry, assignment, pool.shards)


def _plan_surplus(pool: _Pool) -> PoolPlan:
    from libra.plan.place_surplus import column_count, place_surplus  # imports numba

    config, heads = pool.config, pool.heads
    columns = column_count(heads, pool.shards, config.chunks)
    uncut = pool.geometry()

    def placed(node_local_first: bool) -> PoolPlan:
        geometry, assignment = place_surplus(
            uncut, heads, columns, config, node_local_first, pool.speeds
        )
        return pool.plan(geometry, assignment, columns)

    best = placed(node_local_first=True)
    if best.imbalance <= config.tolerance:
        return best
    # Too few rows to cut finer.  Workers of a node first may leave room in small parts, which the
    # other order, or whole tiles, can use.
    best = min(best, placed(node_local_first=False), key=lambda plan: plan.imbalance)
    if pool.speeds is None:
        whole_tiles = _plan_paper(pool)
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
    wrong = np.flatnonzero(~(np.isfinite(given) & (given > 0)))
    if len(wrong):
        raise ValueError(f"speeds[{wrong[0]}] is {given[wrong[0]]}; it must be finite and > 0")
    given = given / given.max()  # so that their mean can't overflow
    relative: NDArray[np.int64] = np.rint(1000 * given / given.mean()).astype(np.int64)
    return np.maximum(relative, 1)
