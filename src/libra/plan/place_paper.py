"""The paper's placement: a greedy over all tiles, guided by a load target and by bytes to move.

Tiles are placed by decreasing cost, then by tile ID.  Each goes to a worker that it keeps within
C = (1 + tau) * mean load, the one of least (added bytes, load, ID).  Where no worker has room, it
goes to the worker of least (load, added bytes, ID).  Added bytes are the tile's complete KV groups
that the worker neither holds nor was given before, and Q and O where it is not the Q-home.
"""

from __future__ import annotations

from dataclasses import replace

import numba
import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import IntArray
from libra.plan.geometry import scatter_add, uniform_cuts, with_cuts
from libra.plan.head_groups import cut_heads
from libra.plan.pool_plan import PoolPlan


def place_paper(uncut: PoolPlan) -> PoolPlan:
    """The plan with blocks of at most B tokens, and the worker of each of their tiles."""
    heads, head_shards = uncut.heads, uncut.shards
    geometry = with_cuts(uncut.geometry, uniform_cuts(uncut.geometry, uncut.config.block_size))
    # Step 1: tiles by decreasing cost; equal ones keep the order of their IDs.
    width = heads.q // head_shards
    cost = geometry.block_pairs * width
    order = np.argsort(-np.repeat(cost, head_shards), kind="stable")
    target = (1 + uncut.config.tolerance) * (int(cost.sum()) * head_shards) / geometry.workers

    # Step 2: the units of K and V that each head shard reads.  A unit is the key/value heads that
    # travel as one.  Shards that share a key/value head share its unit, so that a head fetched for
    # one shard serves the next.
    head_groups = cut_heads(heads, head_shards, 1)
    shard = np.arange(head_shards, dtype=np.int64)
    first_unit = head_groups.kv_head_group(shard * head_groups.per_shard)
    last_unit = head_groups.kv_head_group((shard + 1) * head_groups.per_shard - 1)

    # Step 3: rows of each sample that each rank of its CP group holds.
    shards, samples = geometry.sample_shards, len(geometry.sample_start)
    rank = geometry.fragment_worker[shards.right] % geometry.cp_size
    held = scatter_add((samples, geometry.cp_size), (shards.left, rank), shards.stop - shards.start)
    block_samples = geometry.block_samples
    rows = geometry.block_stop - geometry.block_start
    assignment = _greedy(
        order,
        cost,
        float(target),
        geometry.block_worker,
        rows * (heads.q_bytes(width) + heads.o_bytes(width)),
        np.searchsorted(block_samples.left, np.arange(len(cost) + 1)),
        block_samples.right,
        held,
        np.zeros((samples, head_groups.kv_count, geometry.workers), dtype=np.bool_),
        first_unit,
        last_unit + 1,
        heads.kv_bytes(head_groups.kv_heads),
    )
    return replace(uncut, geometry=geometry, assignment=assignment)


@numba.njit(cache=True)
def _greedy(
    order: IntArray,
    cost: IntArray,
    target: float,
    home: IntArray,
    qo_bytes: IntArray,
    visit_offset: IntArray,
    visit_sample: IntArray,
    held: IntArray,
    present: NDArray[np.bool_],
    first_unit: IntArray,
    end_unit: IntArray,
    unit_bytes: int,
) -> NDArray[np.int32]:
    """`present` [samples, units, workers] says which units each worker was given; all False."""
    cp_size, workers, head_shards = held.shape[1], present.shape[2], len(first_unit)
    sample_length = held.sum(axis=1)
    assignment = np.empty(len(order), dtype=np.int32)
    load = np.zeros(workers, dtype=np.int64)
    added = np.empty(workers, dtype=np.int64)
    for tile in order:
        block, shard = tile // head_shards, tile % head_shards
        if cost[block] == 0:  # padding: nothing to compute, nothing to move
            assignment[tile] = home[block]
            continue
        # Bytes that placing the tile would add on each worker: Q and O away from home, ...
        group = home[block] // cp_size * cp_size  # first worker of the pack's CP group
        units_from, units_to = first_unit[shard], end_unit[shard]
        added[:] = qo_bytes[block]
        added[home[block]] = 0
        # ... and K and V that are not there yet, less those rows that the CP group's ranks hold.
        for visit in range(visit_offset[block], visit_offset[block + 1]):
            sample = visit_sample[visit]
            for unit in range(units_from, units_to):
                for worker in range(workers):
                    if not present[sample, unit, worker]:
                        added[worker] += sample_length[sample] * unit_bytes
                for rank in range(cp_size):
                    if not present[sample, unit, group + rank]:
                        added[group + rank] -= held[sample, rank] * unit_bytes
        best = _choose(load, added, cost[block], target)
        assignment[tile] = best
        load[best] += cost[block]
        for visit in range(visit_offset[block], visit_offset[block + 1]):
            for unit in range(units_from, units_to):
                present[visit_sample[visit], unit, best] = True
    return assignment


@numba.njit(cache=True)
def _choose(load: IntArray, added: IntArray, cost: int, target: float) -> int:
    """The worker with room of least (added bytes, load, ID), else of least (load, added, ID)."""
    best, fallback = -1, 0
    for worker in range(len(load)):
        if load[worker] + cost <= target and (
            best < 0
            or added[worker] < added[best]
            or (added[worker] == added[best] and load[worker] < load[best])
        ):
            best = worker
        if load[worker] < load[fallback] or (
            load[worker] == load[fallback] and added[worker] < added[fallback]
        ):
            fallback = worker
    return fallback if best < 0 else best
