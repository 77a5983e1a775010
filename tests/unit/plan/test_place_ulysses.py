"""Ulysses as a placement: heads over the CP group, with the traffic that textbooks give it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from libra.config import HeadShape, PoolConfig
from libra.plan.place_ulysses import place_ulysses
from libra.plan.plan_pool import plan_pool
from tests.pools import SmallPool, small_pools

ULYSSES = PoolConfig(pool_size=1, placement="ulysses", chunks=1)


def test_head_shard_c_of_a_pack_is_computed_by_rank_c() -> None:
    heads = HeadShape(q=8, kv=4, dim=2)
    plan = plan_pool([[0, 3, 16]], cp_size=4, config=ULYSSES, heads=heads)
    assert plan.assignment.reshape(4, 4).tolist() == [[0, 1, 2, 3]] * 4
    assert plan.load.tolist() == [2 * (6 + 91)] * 4


def test_each_pack_stays_in_its_own_cp_group() -> None:
    config, heads = PoolConfig(pool_size=2, chunks=1, tolerance=9.0), HeadShape(q=2, kv=2, dim=1)
    uncut = plan_pool([[0, 4], [0, 4]], cp_size=2, config=config, heads=heads)
    plan = place_ulysses(uncut)
    assert plan.assignment.reshape(-1, 2).tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]


@settings(max_examples=60)
@given(small_pools(placements=("ulysses",)))
def test_traffic_is_that_of_the_textbook(pool: SmallPool) -> None:
    """Each rank keeps 1 / CP of its own query heads and sends the rest; the key/value heads that a
    shard reads go to its rank from every other, a head that several shards read to each of them.
    """
    plan, heads, cp_size = pool.plan(), pool.heads, pool.cp_size
    width = heads.q // cp_size
    kv_heads = [
        len({head // heads.group for head in range(rank * width, (rank + 1) * width)})
        for rank in range(cp_size)
    ]
    held = plan.geometry.block_stop - plan.geometry.block_start
    real = np.bincount(plan.geometry.block_worker, weights=held, minlength=cp_size)
    q, kv, o = plan.traffic
    for source in range(cp_size):
        for destination in range(cp_size):
            rows = 0 if source == destination else int(real[source]) * heads.bytes
            assert q[source, destination] == rows * width * heads.dim
            assert o[destination, source] == rows * width * heads.value_dim
            widths = heads.dim + heads.value_dim
            assert kv[source, destination] == rows * kv_heads[destination] * widths
    assert len(set(plan.load.tolist())) == 1


def test_a_full_pack_moves_all_but_one_part_in_cp_of_each_tensor() -> None:
    tokens, cp_size = 4096, 8
    heads = HeadShape(q=32, kv=8, dim=128, bytes=2)
    plan = plan_pool([[0, 1000, tokens]], cp_size=cp_size, config=ULYSSES, heads=heads)
    moves = tokens * (cp_size - 1) // cp_size
    assert plan.traffic[0].sum() == plan.traffic[2].sum() == moves * 32 * 128 * 2
    assert plan.traffic[1].sum() == 2 * moves * 8 * 128 * 2


def test_fewer_kv_heads_than_ranks_are_sent_once_to_each_rank() -> None:
    tokens, cp_size = 1024, 8
    heads = HeadShape(q=8, kv=2, dim=16, bytes=2)
    plan = plan_pool([[0, tokens]], cp_size=cp_size, config=ULYSSES, heads=heads)
    # One head, to each of the others.
    assert plan.traffic[1].sum() == 2 * tokens * (cp_size - 1) * 16 * 2


def test_forty_query_heads_at_cp_16_are_refused_by_name_and_planned_by_libra() -> None:
    heads = HeadShape(q=40, kv=8, dim=16)
    with pytest.raises(ValueError, match=r"Ulysses .*40 query heads \(8 key/value\) at CP 16"):
        plan_pool([[0, 4096]], cp_size=16, config=ULYSSES, heads=heads)
    for placement in ("paper", "surplus"):
        config = PoolConfig(
            pool_size=1, block_size=64, head_shards=8, placement=placement, chunks=5
        )
        plan = plan_pool([[0, 4096]], cp_size=16, config=config, heads=heads)
        assert plan.imbalance < 0.04


def test_ulysses_takes_no_note_of_block_size_and_head_shards() -> None:
    heads = HeadShape(q=8, kv=4, dim=2)
    plans = [
        plan_pool([[0, 16]], cp_size=4, config=ULYSSES.replace(**changes), heads=heads)
        for changes in ({}, {"block_size": 3}, {"head_shards": 5})
    ]
    assert len({plan.assignment.tobytes() for plan in plans}) == 1
