"""Libra's placement: all tiles stay at home but the surplus of the workers above the target.

    rows of a long sample ^  d d d . . .   columns: key/value head groups of one sample
                          |  d d b . . .   a worker keeps columns up to its target (.), and gives
                          |  a c b . . .   the others; other workers take runs of rows (a, b, c, d),
                          |  . . . . . .   top first: late rows hold the most pairs for each row
                             columns ->    that travels, and one prefix of K and V serves a run

Pieces are cut at any row and head group, so the balance depends on neither B nor H.  A piece that
ends at row b of its sample costs b rows of K and V and its own rows of Q and O.  The workers with
the most room take the highest rows, where long runs pay best; those with little room take nothing.
A node's own surplus goes to its own workers first.  Work that would take a worker past its limits
stays at home, so that limits hold and the balance suffers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from libra.config import HeadShape
from libra.data.lengths import causal_pairs
from libra.plan.geometry import scatter_add, with_cuts
from libra.plan.place_surplus_kernels import ByteBudget, Loads, SampleShards, move_surplus
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import byte_limits


def column_count(heads: HeadShape, head_shards: int, chunks: int) -> int:
    """Head columns that pieces are cut from: the finest multiple of H that splits no key/value head
    and M can still cut.
    """
    multiples = range(head_shards, heads.kv + 1, head_shards)
    fits = [n for n in multiples if heads.kv % n == 0 and heads.q // n % chunks == 0]
    return max(fits, default=head_shards)


def place_surplus(uncut: PoolPlan, *, node_local_first: bool = True) -> PoolPlan:
    """The plan with its blocks cut where pieces end, its head shards cut into columns, and the
    worker of each tile.

    With `node_local_first` workers of a node take each other's surplus before others do.
    """
    geometry, heads, config = uncut.geometry, uncut.heads, uncut.config
    columns = column_count(heads, uncut.shards, config.chunks)
    # Step 1: shards of samples, with rows counted from the start of the sample.
    held = geometry.sample_shards
    origin = geometry.sample_start[held.left]
    low, high = held.start - origin, held.stop - origin
    worker = geometry.fragment_worker[held.right]
    begin = np.searchsorted(held.left, np.arange(len(geometry.sample_start) + 1))

    # Step 2: loads and targets.
    workers, width = geometry.workers, heads.q // columns
    load = scatter_add((workers,), worker, causal_pairs(low, high) * heads.q)
    speeds = np.ones(workers) if uncut.speeds is None else uncut.speeds
    target = (1.0 + config.tolerance) * load.sum() * (speeds / speeds.sum())

    # Step 3: pieces that move.  Each column counts as many key/value heads as the one that reads
    # most: of 12 query heads over 3, four columns of 3 read heads 0, 0-1, 1-2 and 2, so it is 2.
    first_head = np.arange(columns) * width
    kv_heads = (first_head + width - 1) // heads.group - first_head // heads.group + 1
    q_row, o_row = heads.q_bytes(width), heads.o_bytes(width)
    budget = ByteBudget(
        moved=np.zeros((3, workers), dtype=np.int64),
        limits=byte_limits(config, heads, int(geometry.rows.max())),
        home_row=np.array([q_row, o_row, 0]),
        taker_row=np.array([o_row, q_row, q_row + o_row]),
        kv_row=heads.kv_bytes(int(kv_heads.max())),
    )
    moved = move_surplus(
        SampleShards(begin, held.left, low, high, worker),
        np.lexsort((-(low + high), worker)),  # a worker gives its latest rows first
        columns,
        Loads(load, target, width, row_step(geometry.tokens)),
        budget,
        np.arange(workers, dtype=np.int64) // config.ranks_per_node,
        node_local_first,
    )

    # Step 4: cut blocks where pieces start and end, and give each piece's tiles to its taker.
    sample, column, low, high, taker = moved.T
    start, stop = geometry.sample_start[sample] + low, geometry.sample_start[sample] + high
    ends = stop[stop < geometry.tokens * geometry.packs]  # no block starts where the pool ends
    cut = with_cuts(geometry, np.unique(np.concatenate([geometry.fragment_start, start, ends])))
    tiles = np.repeat(cut.block_worker, columns).reshape(-1, columns).astype(np.int32)
    first, last = np.searchsorted(cut.block_start, start), np.searchsorted(cut.block_start, stop)
    for i in range(len(sample)):
        tiles[first[i] : last[i], column[i]] = taker[i]
    return replace(uncut, geometry=cut, shards=columns, assignment=tiles.ravel())


def row_step(tokens: int) -> int:
    """Rows to which pieces are cut: a power of two, at most 128, at most L / 1024."""
    return 1 << min(7, max(0, (tokens // 1024).bit_length() - 1))
