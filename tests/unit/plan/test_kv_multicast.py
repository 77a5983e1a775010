"""KV multicast: every fetch gets its rows once, no row leaves its holder twice without reason, and
no worker has to send more than the busiest did.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.config import HeadShape, PoolConfig
from libra.plan.kv_fetch import KVTransfers, kv_transfers
from libra.plan.kv_multicast import FEWEST_ROWS, multicast_runs, relieves
from libra.plan.plan_pool import PoolPlan, plan_pool
from tests.pools import SmallPool, real_pool, small_pools

LENGTHS = Path(__file__).parents[2] / "data" / "lengths-code.npy"
TOKENS = 262_144
ONE_HEAD = HeadShape(q=4, kv=1, dim=4)
LONG, SHORT = [0, 256], list(range(0, 257, 16))


def spread_pool(packs: int, **changes: Any) -> PoolPlan:
    """One long sample next to packs of short ones: all others take rows of it."""
    config = PoolConfig(pool_size=packs, chunks=1, ranks_per_node=1).replace(**changes)
    return plan_pool([LONG, *[SHORT] * (packs - 1)], cp_size=1, config=config, heads=ONE_HEAD)


def direct(plan: PoolPlan) -> KVTransfers:
    return kv_transfers(plan.geometry, plan.kv_fetches)


def same(a: KVTransfers, b: KVTransfers) -> bool:
    return all(
        np.array_equal(getattr(a, n), getattr(b, n)) for n in [f.name for f in fields(KVTransfers)]
    )


def check_coverage(plan: PoolPlan, runs: KVTransfers) -> None:
    """Each fetch has each of its rows once; what a multicast passes on has come to it before."""
    order = np.lexsort((runs.offset, runs.fetch))
    fetch, offset, length = runs.fetch[order], runs.offset[order], runs.length[order]
    first, last = np.ones((2, len(fetch)), dtype=np.bool_)
    first[1:], last[:-1] = fetch[1:] != fetch[:-1], fetch[1:] != fetch[:-1]
    assert (length > 0).all()
    assert (offset[first] == 0).all()
    assert (offset[1:] == offset[:-1] + length[:-1])[~first[1:]].all()
    assert (offset + length == plan.kv_fetches.length[fetch])[last].all()
    assert fetch[first].tolist() == np.flatnonzero(~plan.kv_fetches.resident).tolist()
    later = np.flatnonzero(runs.passed_on)
    via = runs.via[later]
    assert not runs.passed_on[via].any()
    assert (runs.destination[via] == runs.source[later]).all()
    assert (runs.source[later] != runs.destination[later]).all()
    assert (runs.length[via] >= runs.length[later]).all()
    columns = (runs.offset, runs.chunk, runs.kv_head_group, plan.kv_fetches.sample[runs.fetch])
    for column in columns:
        assert (column[via] == column[later]).all()


@pytest.mark.usefixtures("eager_multicasts")
@given(small_pools(placements=("surplus",)), st.data())
@settings(max_examples=150)
def test_every_fetch_gets_each_of_its_rows_once(pool: SmallPool, data: st.DataObject) -> None:
    plan = pool.plan()
    if data.draw(st.booleans()):  # tiles anywhere: many destinations
        random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        anywhere = random.integers(0, plan.workers, len(plan.assignment), dtype=np.int32)
        plan = replace(plan, assignment=anywhere)
    check_coverage(plan, plan.kv_transfers)
    rows = [
        m.rows(plan.workers, plan.head_groups.chunks) for m in (direct(plan), plan.kv_transfers)
    ]
    arrived = [moved.sum(axis=(0, 1, 2)) for moved in rows]
    assert (arrived[0] == arrived[1]).all()  # all receive what they did without multicasts


@pytest.mark.usefixtures("eager_multicasts")
@given(small_pools(placements=("surplus",)))
@settings(max_examples=100)
def test_a_row_leaves_its_holder_for_other_nodes_once(pool: SmallPool) -> None:
    plan, per_node = pool.plan(), pool.config.ranks_per_node
    runs = plan.kv_transfers
    far = ~runs.passed_on & (runs.source // per_node != runs.destination // per_node)
    sent = set()
    for i in np.flatnonzero(far):
        for row in range(runs.source_row[i], runs.source_row[i] + runs.length[i]):
            key = (int(runs.chunk[i]), int(runs.source[i]), int(runs.kv_head_group[i]), row)
            assert key not in sent
            sent.add(key)


@given(small_pools(placements=("surplus",)))
@settings(max_examples=100)
def test_a_multicast_never_raise_what_the_busiest_worker_sends(pool: SmallPool) -> None:
    plan = pool.plan()
    q, kv, o = plan.traffic
    rows = direct(plan).rows(plan.workers, plan.head_groups.chunks).sum(axis=(0, 1))
    row = plan.heads.kv_bytes(plan.head_groups.kv_heads)
    assert (q + kv + o).sum(axis=1).max() <= (q + row * rows + o).sum(axis=1).max()


def test_three_takers_pass_a_prefix_on_to_each_other() -> None:
    plan = spread_pool(4)
    rows = plan.kv_fetches.length[plan.kv_fetches.sample == 0]
    takers = sorted(rows[1:].tolist())  # of workers 1 to 3; worker 0 has them all
    assert len(takers) == 3 and takers[0] >= FEWEST_ROWS
    before = direct(plan).rows(4, 1).sum(axis=(0, 1))
    after = plan.kv_transfers.rows(4, 1)
    assert before[0].tolist() == [0, *rows[1:].tolist()]
    assert after.sum() == before.sum()
    assert after[0].sum() == after[0, 0, 0].sum() == takers[-1]  # each row leaves worker 0 once
    assert after[1, 0, 0].sum() == 0
    assert (after[1, 0, 1:].sum(axis=1) > 0).all()  # and all take part in passing on
    assert (after.sum(axis=(0, 1)).sum(axis=1) < before[0].sum()).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks_per_node": 4},  # all are neighbours
        {"placement": "paper", "block_size": 16},
    ],
)
def test_neighbours_and_the_papers_placement_have_no_multicast(changes: dict[str, Any]) -> None:
    plan = spread_pool(4, **changes)
    assert plan.traffic[1].any()
    assert same(plan.kv_transfers, direct(plan))


def test_one_destination_has_no_multicast() -> None:
    plan = spread_pool(2)
    assert plan.traffic[1].any()
    assert same(plan.kv_transfers, direct(plan))


def test_short_runs_have_no_multicast() -> None:
    config = PoolConfig(pool_size=4, chunks=1, ranks_per_node=1)
    tokens = FEWEST_ROWS - 1
    packs = [[0, tokens], *[list(range(tokens + 1))] * 3]
    plan = plan_pool(packs, cp_size=1, config=config, heads=HeadShape(q=4, kv=1, dim=16))
    assert plan.traffic[1].any()
    assert same(plan.kv_transfers, direct(plan))


def test_a_multicast_that_relieves_no_one_is_not_taken() -> None:
    """Workers 0 and 1 are a node, 2 and 3 another; worker 0 sends most to the other."""
    direct = np.array([[0, 9, 4, 4], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    less, more_in_all, another = direct.copy(), direct.copy(), direct.copy()
    less[0, 3], less[2, 3] = 0, 4
    assert relieves(direct, less, per_node=2)
    more_in_all[0, 3], more_in_all[2, 3] = 0, 18  # worker 2 sends more than any did
    assert not relieves(direct, more_in_all, per_node=2)
    another[0, 3], another[2, 1] = 0, 8  # worker 2 sends as much to the other node as 0 did
    assert not relieves(direct, another, per_node=2)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_heaviest_pack_of_a_real_pool_sends_half_as_much(layout: Any) -> None:
    heads = HeadShape(q=128, kv=16, dim=256)
    plan = plan_pool(real_pool(), cp_size=8, config=PoolConfig(shard_layout=layout), heads=heads)
    check_coverage(plan, plan.kv_transfers)
    assert same(
        plan.kv_transfers, multicast_runs(direct(plan), plan.kv_fetches, workers=64, per_node=8)
    )
    before, after = (
        m.rows(plan.workers, plan.head_groups.chunks).sum(axis=(0, 1))
        for m in (direct(plan), plan.kv_transfers)
    )
    assert after.sum() == before.sum()
    assert after.sum(axis=1).max() <= 0.6 * before.sum(axis=1).max()
    # What multicasts pass on is spread: none passes on half of what some receive.
    passed_on = plan.kv_transfers.rows(plan.workers, plan.head_groups.chunks)[1].sum(axis=(0, 2))
    assert passed_on.max() <= 0.5 * after.sum(axis=0).max()
