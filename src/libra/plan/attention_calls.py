"""The kernel calls of one worker: its tiles' segments, joined where they continue each other,
grouped by what they read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.head_groups import HeadGroups
from libra.plan.plan_pool import PoolPlan
from libra.plan.segments import AttentionCall

IntArray = NDArray[np.int64]

LOCAL = -1
"""In place of a chunk: the worker's own tensors, or work that waits for nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel call: segments that read one q buffer and one kv buffer."""

    chunk: int
    """Runs once this chunk has arrived; LOCAL runs at once."""
    q_buffer: int
    """Chunk whose fetched Q it reads, or LOCAL."""
    kv_buffer: int
    """Chunk whose fetched K/V it reads, or LOCAL."""
    segments: AttentionCall


def worker_launches(
    plan: PoolPlan, worker: int, q_offset: IntArray, kv_start: IntArray
) -> tuple[Launch, ...]:
    geometry, head_groups, needs = plan.geometry, plan.head_groups, plan.kv_fetches
    block_samples = geometry.block_samples
    tiles = plan.assignment.reshape(-1, head_groups.shards)
    visit, shard = np.nonzero(tiles[block_samples.first] == worker)
    visit = np.repeat(visit, head_groups.per_shard)
    head_group = (shard[:, None] * head_groups.per_shard + np.arange(head_groups.per_shard)).ravel()
    shard = np.repeat(shard, head_groups.per_shard)
    block, sample = block_samples.first[visit], block_samples.second[visit]
    chunk, kv_head_group = head_groups.chunk(head_group), head_groups.kv_head_group(head_group)
    need = needs.find(np.full_like(sample, worker), sample, kv_head_group, head_groups)

    home = geometry.block_worker[block] == worker
    into_block = block_samples.start[visit] - geometry.block_start[block]
    fetched = q_offset[block * head_groups.shards + shard, head_group % head_groups.per_chunk]
    first_piece = geometry.sample_shards.second[needs.piece_first[need]]
    sample_row = (
        geometry.fragment_local[first_piece]
        + geometry.sample_start[sample]
        - geometry.fragment_start[first_piece]
    )
    resident = needs.resident[need]
    work = _Work(
        chunk=np.where(home & resident, LOCAL, chunk),
        q_buffer=np.where(home, LOCAL, chunk),
        kv_buffer=np.where(resident, LOCAL, needs.chunk[need]),
        head_group=head_group,
        q_start=into_block + np.where(home, geometry.block_local[block], fetched),
        q_len=block_samples.stop[visit] - block_samples.start[visit],
        k_start=np.where(resident, sample_row, kv_start[need]),
        k_len=block_samples.stop[visit] - geometry.sample_start[sample],
    )
    return _group(_merge_rows(work), head_groups)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """AttentionCall before they are grouped into launches; int64 [segments]."""

    chunk: IntArray
    q_buffer: IntArray
    kv_buffer: IntArray
    head_group: IntArray
    q_start: IntArray
    q_len: IntArray
    k_start: IntArray
    k_len: IntArray

    def take(self, index: IntArray) -> _Work:
        return _Work(*(getattr(self, name)[index] for name in self.__slots__))


def _merge_rows(work: _Work) -> _Work:
    """Join segments that continue each other: neighbouring blocks of one sample and head_group on one
    worker.
    """
    work = work.take(
        np.lexsort(
            (work.q_start, work.k_start, work.head_group, work.kv_buffer, work.q_buffer, work.chunk)
        )
    )
    if not len(work.head_group):
        return work
    opens = np.ones(len(work.head_group), dtype=np.bool_)
    same = [getattr(work, n) for n in ("chunk", "q_buffer", "kv_buffer", "head_group", "k_start")]
    opens[1:] = (
        np.any([column[1:] != column[:-1] for column in same], axis=0)
        | (work.q_start[1:] != work.q_start[:-1] + work.q_len[:-1])
        | (work.k_len[1:] != work.k_len[:-1] + work.q_len[1:])
    )
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(opens)) - 1
    joined = work.take(first)
    return _Work(
        chunk=joined.chunk,
        q_buffer=joined.q_buffer,
        kv_buffer=joined.kv_buffer,
        head_group=joined.head_group,
        q_start=joined.q_start,
        q_len=np.add.reduceat(work.q_len, first),
        k_start=joined.k_start,
        k_len=work.k_len[last],
    )


def _group(work: _Work, head_groups: HeadGroups) -> tuple[Launch, ...]:
    """Launches of equal buffers and head width, in the order in which they run."""
    width = np.ones(len(work.head_group), dtype=np.int64)  # head_groups that one segment spans
    work, width = _merge_lanes(work, width, head_groups)
    kv_head_group = head_groups.kv_head_group(work.head_group)
    last = head_groups.kv_head_group(work.head_group + width - 1)
    heads, kv_heads = width * head_groups.heads, (last - kv_head_group + 1) * head_groups.kv_heads
    key = np.stack([work.chunk, work.q_buffer, work.kv_buffer, heads, kv_heads], axis=1)
    launches = []
    for group in np.unique(key, axis=0):
        rows = np.flatnonzero((key == group).all(axis=1))
        rows = rows[np.lexsort((work.q_start[rows], work.head_group[rows]))]
        chunk, q_buffer, kv_buffer, group_heads, group_kv = (int(value) for value in group)
        launches.append(
            Launch(
                chunk=chunk,
                q_buffer=q_buffer,
                kv_buffer=kv_buffer,
                segments=AttentionCall(
                    q_start=work.q_start[rows],
                    q_len=work.q_len[rows],
                    k_start=work.k_start[rows],
                    k_len=work.k_len[rows],
                    q_head=work.head_group[rows] * head_groups.heads
                    if q_buffer == LOCAL
                    else 0 * rows,
                    kv_head=kv_head_group[rows] * head_groups.kv_heads
                    if kv_buffer == LOCAL
                    else 0 * rows,
                    heads=group_heads,
                    kv_heads=group_kv,
                ),
            )
        )
    return tuple(launches)


def _merge_lanes(work: _Work, width: IntArray, head_groups: HeadGroups) -> tuple[_Work, IntArray]:
    """Join neighbouring head_groups of equal rows where all is local: fewer, wider kernel segments."""
    local = (work.q_buffer == LOCAL) & (work.kv_buffer == LOCAL)
    order = np.lexsort(
        (work.head_group, work.k_len, work.k_start, work.q_len, work.q_start, ~local)
    )
    work, local = work.take(order), local[order]
    if not local.any():
        return work, width
    opens = np.ones(len(local), dtype=np.bool_)
    same = [getattr(work, n) for n in ("q_start", "q_len", "k_start", "k_len")]
    opens[1:] = (
        np.any([column[1:] != column[:-1] for column in same], axis=0)
        | (work.head_group[1:] != work.head_group[:-1] + 1)
        | ~local[1:]
    )
    first = np.flatnonzero(opens)
    run = np.diff(np.append(first, len(local)))
    from_head, to_head = (
        work.head_group[first] * head_groups.heads,
        (work.head_group[first] + run) * head_groups.heads,
    )
    whole_groups = (from_head % head_groups.group == 0) & (to_head % head_groups.group == 0)
    one_group = from_head // head_groups.group == (to_head - 1) // head_groups.group
    joins = whole_groups | one_group
    opens |= ~np.repeat(joins, run)  # a run that would tear a query group stays in head_groups
    first = np.flatnonzero(opens)
    return work.take(first), np.diff(np.append(first, len(local)))
