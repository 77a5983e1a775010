"""Planning a pool: lengths and configuration in, a `PoolPlan` out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.geometry import Geometry, pool_geometry
from libra.plan.lanes import cut_lanes
from libra.plan.pool_plan import PoolPlan
from libra.plan.ulysses import check_ulysses, place_ulysses
from libra.workload import check_count, check_cu_seqlens

__all__ = ["PoolPlan", "head_shards", "plan_pool"]


def plan_pool(
    cu_seqlens_per_pack: Sequence[ArrayLike],
    *,
    cp_size: int,
    config: PoolConfig,
    heads: HeadShape,
    tokens: int | None = None,
) -> PoolPlan:
    """Plan the attention of one pool: which worker computes which tile, and what travels.

    `cu_seqlens_per_pack` holds one int array a pack, [samples + 1] from 0; `tokens` is L where
    packs end in padding (None: all packs end at the same token).  Pure and deterministic: the same
    arguments give the same plan everywhere.

    Raises ValueError for lengths that don't fit, heads that don't divide by H and M, or a pool of
    other than P packs.
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
    cut_lanes(heads, shards, config.chunks)  # refuses heads that don't divide, before any work
    bounds = tuple(check_cu_seqlens(cu, tokens=tokens) for cu in cu_seqlens_per_pack)
    length = int(bounds[0][-1]) if tokens is None else tokens
    geometry = pool_geometry(
        bounds,
        cp_size=cp_size,
        block_size=length if config.placement == "ulysses" else config.block_size,
        layout=config.shard_layout,
        tokens=tokens,
    )

    def plan(geometry: Geometry, shards: int, assignment: NDArray[np.int32]) -> PoolPlan:
        made = PoolPlan(
            cu_seqlens=bounds,
            tokens=length,
            cp_size=cp_size,
            config=config,
            heads=heads,
            cuts=geometry.block_start,
            shards=shards,
            assignment=assignment,
        )
        made.__dict__["geometry"] = geometry  # spare the cached property the work
        return made

    if config.placement == "ulysses":
        return plan(geometry, shards, place_ulysses(geometry))
    # numba costs half a second to import: only where a plan is made
    from libra.plan.paper import place_paper
    from libra.plan.surplus import column_count, place_surplus

    if config.placement == "paper":
        return plan(geometry, shards, place_paper(geometry, heads, shards, config.tolerance))
    columns = column_count(heads, shards, config.chunks)
    cut, assignment = place_surplus(geometry, heads, columns, config.tolerance)
    best = plan(cut, columns, assignment)
    if best.imbalance > config.tolerance:  # too few rows to cut finer: whole tiles may fit better
        greedy = plan(geometry, shards, place_paper(geometry, heads, shards, config.tolerance))
        best = min(best, greedy, key=lambda made: made.imbalance)
    return best


def head_shards(config: PoolConfig, cp_size: int) -> int:
    """H in force: Ulysses always has one shard a CP rank."""
    return cp_size if config.placement == "ulysses" else config.head_shards
