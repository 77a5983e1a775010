"""K and V rows that workers fetch, against tokens counted one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.plan.kv_fetch import kv_buffer_rows, kv_transfers
from libra.plan.plan_pool import PoolPlan
from tests.pools import SmallPool, small_pools
from tests.slow_planner import sample_tables

Key = tuple[int, int, int]
"""Worker, sample, kv head group."""


def slow_fetches(plan: PoolPlan) -> dict[Key, tuple[int, int]]:
    """Rows and first chunk of each fetch, tile by tile."""
    tables = sample_tables([cu.tolist() for cu in plan.cu_seqlens])
    lengths: dict[int, int] = {}
    for table in tables:
        for sample, position in table.values():
            lengths[sample] = max(lengths.get(sample, 0), position + 1)
    found: dict[Key, tuple[int, int]] = {}
    groups = plan.head_groups
    for tile, worker in enumerate(plan.assignment.tolist()):
        block, shard = divmod(tile, plan.shards)
        start, stop = plan.geometry.block_start[block], plan.geometry.block_stop[block]
        pack = start // plan.tokens
        for position in range(start - pack * plan.tokens, stop - pack * plan.tokens):
            sample, within = tables[pack][position]
            rows = lengths[sample] if plan.config.placement == "paper" else within + 1
            for group in range(shard * groups.per_shard, (shard + 1) * groups.per_shard):
                head_group = np.array([group])
                key = worker, sample, int(groups.kv_head_group(head_group)[0])
                chunk = int(groups.chunk(head_group)[0])
                longest, first = found.get(key, (0, chunk))
                found[key] = max(longest, rows), min(first, chunk)
    return found


@settings(max_examples=40)
@given(small_pools(placements=("surplus", "paper", "ulysses")))
def test_each_worker_fetches_what_its_tiles_read_once(pool: SmallPool) -> None:
    plan = pool.plan()
    fetches, slow = plan.kv_fetches, slow_fetches(plan)
    keys = zip(
        fetches.worker.tolist(),
        fetches.sample.tolist(),
        fetches.kv_head_group.tolist(),
        strict=True,
    )
    values = zip(fetches.length.tolist(), fetches.chunk.tolist(), strict=True)
    assert list(zip(keys, values, strict=True)) == sorted(slow.items())


@settings(max_examples=40)
@given(small_pools(placements=("surplus", "paper", "ulysses")), st.integers(0, 2**32 - 1))
def test_direct_runs_bring_every_row_of_each_fetch_from_its_holder(
    pool: SmallPool, seed: int
) -> None:
    plan = pool.plan()
    random = np.random.default_rng(seed)
    anywhere = random.integers(0, plan.workers, len(plan.assignment), dtype=np.int32)
    plan = replace(plan, assignment=anywhere)
    geometry, fetches = plan.geometry, plan.kv_fetches
    runs = kv_transfers(geometry, fetches)
    brought: dict[int, list[int]] = {}
    for i in range(len(runs.fetch)):
        fetch, offset, length = int(runs.fetch[i]), int(runs.offset[i]), int(runs.length[i])
        brought.setdefault(fetch, []).extend(range(offset, offset + length))
        position = geometry.sample_start[fetches.sample[fetch]] + offset
        fragment = int(np.searchsorted(geometry.fragment_start, position, side="right")) - 1
        assert geometry.fragment_worker[fragment] == runs.source[i]
        row = geometry.fragment_local[fragment] + position - geometry.fragment_start[fragment]
        assert row == runs.source_row[i]
    for fetch, resident in enumerate(fetches.resident.tolist()):
        rows = [] if resident else list(range(fetches.length[fetch]))
        assert sorted(brought.get(fetch, [])) == rows


@settings(max_examples=40)
@given(small_pools(placements=("surplus", "paper", "ulysses")))
def test_fetches_fill_their_kv_buffer_without_gaps(pool: SmallPool) -> None:
    plan = pool.plan()
    runs, fetches = plan.kv_transfers, plan.kv_fetches
    rows = kv_buffer_rows(runs, fetches, plan.workers)
    for chunk in range(plan.head_groups.chunks):
        for worker in range(plan.workers):
            mine = np.flatnonzero((runs.chunk == chunk) & (runs.destination == worker))
            for first in (rows.arrival[mine], rows.buffer[mine]):
                covered = [
                    row
                    for start, length in zip(first, runs.length[mine], strict=True)
                    for row in range(start, start + length)
                ]
                assert sorted(covered) == list(range(runs.length[mine].sum()))
    assert (rows.start[fetches.resident] == -1).all()
