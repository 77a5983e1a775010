"""Distributed equals single process: outputs and all gradients, for any lengths, shapes and
shards.
"""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

import libra
from tests.distributed.cases import Case, attention_case
from tests.distributed.ranks import RankPool

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def check(ranks: RankPool, case: Case) -> list[int]:
    """Run a case and hold its errors against the dtype's tolerance; returns the loads."""
    errors = ranks.run(attention_case, case)
    assert max(e.worst for e in errors) <= TOLERANCE[case.dtype], errors
    return errors[0].load


def test_one_long_sample_beside_short_ones_is_shared_evenly(ranks2: RankPool) -> None:
    config = libra.PoolConfig(pool_size=2, block_size=8, head_shards=1, chunks=2)
    load = check(ranks2, Case(bounds=[[0, 64], list(range(0, 65, 8))], tokens=64, config=config))
    assert max(load) <= 1.03 * sum(load) / 2 + 4 * 64 * 8


def draw_bounds(data: st.DataObject, tokens: int) -> list[int]:
    """Sample bounds that favour what breaks: 1-token samples, one full sample, bounds on block and
    shard edges.
    """
    style = data.draw(st.sampled_from(["one", "edges", "any", "padded"]))
    if style == "one":
        return [0, tokens]
    if style == "edges":
        return [
            0,
            *sorted(data.draw(st.sets(st.sampled_from(range(4, tokens, 4)), max_size=6))),
            tokens,
        ]
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens - 1), max_size=8)))
    end = tokens if style == "any" else (cuts[-1] if cuts else tokens)
    return sorted({0, *cuts, end})


@st.composite
def cases(draw: st.DrawFn, world: int) -> Case:
    cp = draw(st.sampled_from([c for c in (1, 2, 4) if c <= world]))
    dp = world // cp
    placement = draw(st.sampled_from(["surplus", "surplus", "paper", "ulysses"]))
    tokens = draw(st.sampled_from([24, 32, 37, 64]))
    shards, chunks, kv, group = (draw(st.sampled_from([1, 2, 3])) for _ in range(4))
    if placement == "ulysses":
        heads = cp * chunks * draw(st.sampled_from([1, 2]))
        kv = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    else:
        heads = shards * chunks * kv * group
    dims = draw(st.sampled_from([(4, 4), (8, 4), (4, 8)]))
    data = draw(st.data())
    return Case(
        bounds=[draw_bounds(data, tokens) for _ in range(dp)],
        tokens=tokens,
        cp=cp,
        heads=(heads, kv, *dims),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
        config=libra.PoolConfig(
            pool_size=1
            if placement == "ulysses"
            else draw(st.sampled_from([p for p in (1, 2, 4) if dp % p == 0])),
            block_size=draw(st.sampled_from([1, 3, 8, 64])),
            head_shards=shards,
            chunks=chunks,
            placement=placement,
            shard_layout=draw(st.sampled_from(["contiguous", "zigzag"])),
            backward=draw(st.sampled_from(["retain", "refetch"])),
        ),
    )


@settings(max_examples=80, deadline=None)
@given(case=cases(2))
def test_two_ranks_equal_the_reference(ranks2: RankPool, case: Case) -> None:
    check(ranks2, case)


@settings(max_examples=80, deadline=None)
@given(case=cases(4))
def test_four_ranks_equal_the_reference(ranks4: RankPool, case: Case) -> None:
    check(ranks4, case)
