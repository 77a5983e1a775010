"""Random small pools for property tests, and pools of real lengths."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from libra.config import HeadShape, Placement, PoolConfig
from libra.data.packing import pack_sequential
from libra.data.pools import place_packs
from libra.plan.plan_pool import PoolPlan, plan_pool

IntArray = NDArray[np.int64]

DATA = Path(__file__).parent / "data"

# Exact in binary, so that a load that equals its target does so in floats as in fractions.
TOLERANCES = (0.0, 1 / 32, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPool:
    """The arguments of one plan."""

    packs: list[list[int]]
    """Sample bounds of each pack; zero-length samples are among them."""
    tokens: int
    cp_size: int
    config: PoolConfig
    heads: HeadShape

    def plan(self) -> PoolPlan:
        return plan_pool(
            self.packs,
            cp_size=self.cp_size,
            config=self.config,
            heads=self.heads,
            tokens=self.tokens,
        )


@st.composite
def head_shapes(draw: st.DrawFn, *, multiple: int = 1) -> HeadShape:
    """Grouped, multi-head and multi-query shapes with a multiple of `multiple` query heads."""
    q = multiple * draw(st.integers(1, 12 // multiple))
    return HeadShape(
        q=q,
        kv=draw(divisors(q)),
        dim=draw(st.integers(1, 4)),
        bytes=draw(st.sampled_from([2, 4])),
        v_dim=draw(st.none() | st.integers(1, 4)),
    )


def divisors(n: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, n + 1) if n % d == 0])


@st.composite
def sample_bounds(draw: st.DrawFn, tokens: int) -> list[int]:
    """Sample bounds of a pack of `tokens`: often full, sometimes padded, even padding only."""
    end = draw(st.one_of(st.just(tokens), st.integers(0, tokens)))
    inner = draw(st.lists(st.integers(0, end), max_size=6))
    return [0, *sorted(inner), end]


@st.composite
def small_pools(
    draw: st.DrawFn, *, placements: tuple[Placement, ...] = ("paper",), most_tokens: int = 48
) -> SmallPool:
    """Pools of up to 3 packs, CP up to 4: shards that don't divide, blocks that end at no edge."""
    placement = draw(st.sampled_from(placements))
    cp_size = draw(st.integers(1, 4))
    ulysses = placement == "ulysses"
    heads = draw(head_shapes(multiple=cp_size if ulysses else 1))
    head_shards = cp_size if ulysses else draw(divisors(heads.q))
    tokens = draw(st.integers(1, most_tokens))
    config = PoolConfig(
        pool_size=1 if ulysses else draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, tokens + 2)),
        head_shards=1 if ulysses else head_shards,
        chunks=draw(divisors(heads.q // head_shards)),
        placement=placement,
        tolerance=draw(st.sampled_from(TOLERANCES)),
        shard_layout=draw(st.sampled_from(["contiguous", "zigzag"])),
        ranks_per_node=draw(st.sampled_from([1, 2, 8])),
    )
    packs = [draw(sample_bounds(tokens)) for _ in range(config.pool_size)]
    return SmallPool(packs=packs, tokens=tokens, cp_size=cp_size, config=config, heads=heads)


@cache
def real_pool(tokens: int = 262_144, global_batch: int = 128, pool_size: int = 8) -> list[IntArray]:
    """Sample bounds of the first pool of the first window of real lengths, after VRSP."""
    lengths = np.load(DATA / "lengths-code.npy")
    packs = pack_sequential(lengths[lengths <= tokens], tokens)
    chosen = place_packs(packs.workloads[:global_batch], pool_size)[0]
    return [packs.cu_seqlens(int(pack)) for pack in chosen]


def expected_plans() -> list[dict[str, str]]:
    """Balance and bytes of plans of real lengths, as the placement of the paper gives them."""
    with (DATA / "expected-plan.csv").open(newline="") as file:
        return list(csv.DictReader(file))
