"""Where samples, fragments and blocks of a pool lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.data.cp_shards import local_positions
from libra.plan.geometry import Geometry, pool_geometry, spread, uniform_cuts, with_cuts
from tests.pools import SmallPool, small_pools
from tests.slow_planner import sample_tables, shard_holders


def lay_out(pool: SmallPool) -> Geometry:
    config = pool.config
    return cut_evenly(
        pool.packs,
        config.block_size,
        cp_size=pool.cp_size,
        layout=config.shard_layout,
        tokens=pool.tokens,
    )


def cut_evenly(packs: list[list[int]], block_size: int, **options: Any) -> Geometry:
    """A pool with blocks of at most `block_size` tokens."""
    geometry = pool_geometry(packs, **options)
    return with_cuts(geometry, uniform_cuts(geometry, block_size))


def holder_of_rows(pool: SmallPool) -> dict[int, tuple[int, int]]:
    """Pool position -> (worker, local row)."""
    where = {}
    for worker in range(len(pool.packs) * pool.cp_size):
        pack, rank = divmod(worker, pool.cp_size)
        rows = local_positions(pool.tokens, pool.cp_size, rank, pool.config.shard_layout)
        where |= {pack * pool.tokens + int(p): (worker, row) for row, p in enumerate(rows)}
    return where


@settings(max_examples=40)
@given(small_pools())
def test_every_token_lies_in_one_fragment_of_the_worker_that_holds_it(pool: SmallPool) -> None:
    geometry = lay_out(pool)
    where = {}
    for worker, start, stop, local in zip(
        geometry.fragment_worker.tolist(),
        geometry.fragment_start.tolist(),
        np.append(geometry.fragment_start[1:], geometry.tokens * geometry.packs).tolist(),
        geometry.fragment_local.tolist(),
        strict=True,
    ):
        where |= {start + i: (worker, local + i) for i in range(stop - start)}
    assert where == holder_of_rows(pool)
    held = np.bincount([worker for worker, _ in where.values()], minlength=geometry.workers)
    assert geometry.rows.tolist() == held.tolist()


@settings(max_examples=40)
@given(small_pools())
def test_blocks_tile_the_pool_and_each_has_one_home(pool: SmallPool) -> None:
    geometry, where = lay_out(pool), holder_of_rows(pool)
    holders = shard_holders(pool.tokens, pool.cp_size, pool.config.shard_layout)
    cuts = [
        pack * pool.tokens + t
        for pack in range(len(pool.packs))
        for t in range(pool.tokens)
        if t % pool.config.block_size == 0 or holders[t] != holders[t - 1]
    ]
    assert geometry.block_start.tolist() == cuts
    for block, (start, stop) in enumerate(zip(cuts, geometry.block_stop.tolist(), strict=True)):
        pack = start // pool.tokens
        end = ([*cuts, len(pool.packs) * pool.tokens])[block + 1]
        assert stop == max(start, min(end, pack * pool.tokens + pool.packs[pack][-1]))
        home, row = int(geometry.block_worker[block]), int(geometry.block_local[block])
        for i in range(stop - start):
            assert where[start + i] == (home, row + i)


@settings(max_examples=40)
@given(small_pools())
def test_the_pairs_of_a_block_are_counted_query_by_query(pool: SmallPool) -> None:
    geometry = lay_out(pool)
    pairs = [0] * len(geometry.block_start)
    for pack, table in enumerate(sample_tables(pool.packs)):
        for token, (_, position) in table.items():
            at = pack * pool.tokens + token
            pairs[int(np.searchsorted(geometry.block_start, at, side="right")) - 1] += position + 1
    assert geometry.block_pairs.tolist() == pairs


@settings(max_examples=40)
@given(small_pools())
def test_block_samples_and_sample_shards_cover_each_token_of_each_sample_once(
    pool: SmallPool,
) -> None:
    geometry = lay_out(pool)
    tokens = [
        pack * pool.tokens + token
        for pack, table in enumerate(sample_tables(pool.packs))
        for token in table
    ]
    for pieces, of_first, of_second in (
        (geometry.block_samples, geometry.block_start, geometry.sample_start),
        (geometry.sample_shards, geometry.sample_start, geometry.fragment_start),
    ):
        ranges = zip(pieces.start.tolist(), pieces.stop.tolist(), strict=True)
        assert [t for start, stop in ranges for t in range(start, stop)] == sorted(tokens)
        assert (of_first[pieces.left] <= pieces.start).all()
        assert (of_second[pieces.right] <= pieces.start).all()
        assert (np.diff(pieces.left) >= 0).all()


@settings(max_examples=40)
@given(small_pools())
def test_cutting_a_pool_at_its_own_blocks_changes_nothing(pool: SmallPool) -> None:
    geometry = lay_out(pool)
    again = with_cuts(geometry, geometry.block_start)
    for name in ("block_start", "block_stop", "block_worker", "block_local", "block_pairs"):
        assert np.array_equal(getattr(again, name), getattr(geometry, name))


def test_a_block_is_cut_where_a_shard_ends() -> None:
    geometry = cut_evenly([[0, 10]], 4, cp_size=2)
    assert geometry.block_start.tolist() == [0, 4, 5, 8]
    assert geometry.block_worker.tolist() == [0, 0, 1, 1]
    assert geometry.block_pairs.tolist() == [10, 5, 21, 19]


def test_a_block_of_padding_is_empty_and_one_that_meets_it_is_short() -> None:
    geometry = cut_evenly([[0, 3]], 2, cp_size=1, tokens=6)
    assert geometry.block_stop.tolist() == [2, 3, 4]
    assert geometry.block_pairs.tolist() == [3, 3, 0]


def test_empty_samples_are_dropped() -> None:
    geometry = pool_geometry([[0, 0, 3, 3, 5, 5]], cp_size=1)
    assert geometry.sample_start.tolist() == [0, 3]
    assert geometry.sample_stop.tolist() == [3, 5]


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 6)), max_size=8),
    st.integers(1, 4),
    st.sampled_from([1, 200]),
)
def test_spread_lays_ranges_end_to_end(
    runs: list[tuple[int, int]], step: int, stretch: int
) -> None:
    start = np.array([first for first, _ in runs], dtype=np.int64)
    count = stretch * np.array([n for _, n in runs], dtype=np.int64)  # short runs, or long ones
    expected = [first + step * i for first, n in zip(start, count, strict=True) for i in range(n)]
    ranges = spread(start, count, step)
    assert ranges.dtype == np.int64
    assert ranges.tolist() == expected


@pytest.mark.parametrize(
    "packs, tokens, message",
    [
        ([], None, "at least one pack"),
        ([[0, 8], [0, 7]], None, r"end at different tokens: \[7, 8\].*tokens=L"),
        ([[0, 8], [0, 9]], 8, "cu_seqlens ends at 9 but the pack has 8 tokens"),
        ([[0, 8], [1, 8]], None, "cu_seqlens starts at 1"),
        ([[0, 5, 3, 8]], None, "cu_seqlens falls from 5 to 3"),
        ([[0]], None, "a pack of 0 tokens"),
        ([[]], 8, "cu_seqlens is empty"),
        ([[0, 2.5]], None, "must be an integer"),
    ],
)
def test_packs_that_do_not_fit_are_refused(
    packs: list[list[int]], tokens: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pool_geometry(packs, cp_size=2, tokens=tokens)
