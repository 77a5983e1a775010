"""Planning a pool: lengths and configuration in, a `PoolPlan` out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import HeadShape, PoolConfig
from libra.data.lengths import check_count, check_cu_seqlens
from libra.plan.geometry import Geometry, pool_geometry
from libra.plan.head_groups import cut_heads
from libra.plan.limits import keeps_limits
from libra.plan.place_ulysses import check_ulysses, place_ulysses
from libra.plan.pool_plan import PoolPlan

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
    length = int(bounds[0][-1]) if tokens is None else tokens

    def blocks_of(block_size: int) -> Geometry:
        return pool_geometry(
            bounds,
            cp_size=cp_size,
            block_size=block_size,
            layout=config.shard_layout,
            tokens=tokens,
        )

    def plan(geometry: Geometry, assignment: NDArray[np.int32], shards: int = shards) -> PoolPlan:
        made = PoolPlan(
            cu_seqlens=bounds,
            tokens=length,
            cp_size=cp_size,
            config=config,
            heads=heads,
            cuts=geometry.block_start,
            shards=shards,
            assignment=assignment,
            speeds=relative,
        )
        made.__dict__["geometry"] = geometry  # spare the cached property the work
        return made

    if config.placement == "ulysses":
        geometry = blocks_of(length)
        return plan(geometry, place_ulysses(geometry))
    # numba costs half a second to import: only where a plan is made
    from libra.plan.place_paper import place_paper
    from libra.plan.place_surplus import column_count, place_surplus

    def greedy() -> PoolPlan:
        geometry = blocks_of(config.block_size)
        return plan(geometry, place_paper(geometry, heads, shards, config.tolerance))

    if config.placement == "paper":
        return greedy()
    columns = column_count(heads, shards, config.chunks)
    geometry = blocks_of(length)

    def surplus(node_local_first: bool) -> PoolPlan:
        placed = place_surplus(geometry, heads, columns, config, node_local_first, relative)
        return plan(*placed, shards=columns)

    best = surplus(node_local_first=True)
    if best.imbalance <= config.tolerance:
        return best
    # Too few rows to cut finer.  Near workers first leave scraps of room; whole tiles may fit.
    best = min(best, surplus(node_local_first=False), key=lambda made: made.imbalance)
    if relative is None:
        whole = greedy()
        if whole.imbalance < best.imbalance and keeps_limits(whole, best):
            return whole
    return best


def head_shards(config: PoolConfig, cp_size: int) -> int:
    """H in force: Ulysses always has one shard a CP rank."""
    return cp_size if config.placement == "ulysses" else config.head_shards


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
    given = given / given.max()  # whose mean can't overflow
    relative: NDArray[np.int64] = np.rint(1000 * given / given.mean()).astype(np.int64)
    return np.maximum(relative, 1)
