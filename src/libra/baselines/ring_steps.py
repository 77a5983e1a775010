"""The steps of a ring, from sample bounds alone: reads and hops of one rank.

    rank          0      1      2      3          step 0: every rank attends to its own block
    holds         a      b      c      d          step 1: rank 0 holds d, rank 1 holds a, ..
    step 1        d      a      b      c          zigzag: a rank's late rows need most blocks, its
    step 2        c      d      a      b          early rows few, and all ranks about as many
    step 3        b      c      d      a

At step s rank r holds the block (keys and values) of rank r - s.  A rank's rows lie in order of
position, so the keys of one sample before any position are one run of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from libra.config import ShardLayout
from libra.data.cp_shards import ShardMap, shard_map
from libra.data.lengths import IntArray
from libra.plan.attention_calls import AttentionCall


@dataclass(frozen=True, slots=True)
class Hop:
    """One rank's part of an all-to-all of blocks, or of their gradients."""

    send_splits: list[int]
    """Rows that this rank sends to each rank, [ranks]."""
    recv_splits: list[int]
    """Rows that each rank sends to this one, [ranks]."""
    moves: bool
    """Whether any rank sends; equal on all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class RingSteps:
    """One pack's ring for one rank; `first`, `stop` and `last` are equal on all ranks."""

    rank: int
    rows: int
    """Rows of this rank."""
    padding: slice
    """Rows of this rank behind the last sample."""
    reads: tuple[AttentionCall, ...]
    """Segments of this rank at each step, [ranks], for one head; their keys are rows of the whole
    block.  Causal at step 0, full rectangles after it.
    """
    first: tuple[int, ...]
    """First row of each rank's block that another rank reads."""
    stop: tuple[int, ...]
    """One past the last such row; no other row of a block travels."""
    last: tuple[int, ...]
    """Last step at which a rank reads each block; 0 where no other rank does."""

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self.first)

    @property
    def before(self) -> int:
        """The rank from which blocks arrive."""
        return (self.rank - 1) % self.ranks

    @property
    def after(self) -> int:
        """The rank to which blocks go."""
        return (self.rank + 1) % self.ranks

    @property
    def shared(self) -> slice:
        """Rows of this rank that travel."""
        return slice(self.first[self.rank], self.stop[self.rank])

    def source(self, step: int) -> int:
        """The rank whose block this rank holds at a step."""
        return (self.rank - step) % self.ranks

    @property
    def last_reader(self) -> int:
        """The last rank that reads this rank's block."""
        return (self.rank + self.last[self.rank]) % self.ranks

    def block_hop(self, step: int) -> Hop:
        """The block held at `step` goes to the next rank, if that or a later one reads it."""
        held, arriving = self.source(step), self.source(step + 1)
        sends = {self.after: held} if step < self.last[held] else {}
        receives = {self.before: arriving} if step < self.last[arriving] else {}
        return Hop(self._splits(sends), self._splits(receives), step < max(self.last))

    def grad_hop(self, step: int) -> Hop:
        """The gradient of the block held at `step` follows the block; after the last rank that
        reads the block, it goes to the block's own rank.
        """
        held, arriving = self.source(step), self.source(step + 1)
        # Four ranks, block 0 read up to step 2: its gradient goes 1 -> 2 after step 1, 2 -> 0 after
        # step 2.
        to = self.after if step < self.last[held] else held
        sends = {to: held} if step <= self.last[held] else {}
        receives = {self.before: arriving} if step < self.last[arriving] else {}
        # In one hop a rank may receive the block before it and, from the last reader, its own.
        if step == self.last[self.rank]:
            receives[self.last_reader] = self.rank
        return Hop(self._splits(sends), self._splits(receives), step <= max(self.last))

    def _splits(self, blocks: Mapping[int, int]) -> list[int]:
        """Rows by rank, of blocks that are given as {rank: the rank whose block it is}."""
        rows = {rank: self.stop[source] - self.first[source] for rank, source in blocks.items()}
        return [rows.get(rank, 0) for rank in range(self.ranks)]


def ring_steps(
    cu_seqlens: IntArray, tokens: int, ranks: int, rank: int, layout: ShardLayout
) -> RingSteps:
    """The ring of a pack of `tokens` tokens with checked sample bounds."""
    shards = shard_map(tokens, ranks, layout)
    first, stop, last = [0] * ranks, [0] * ranks, [0] * ranks
    mine: list[AttentionCall] = []
    for step in range(ranks):
        for reader in range(ranks):
            source = (reader - step) % ranks
            reads = _reads(cu_seqlens, shards, reader, source)
            if reader == rank:
                mine.append(reads)
            # Rows of the block that any other rank reads lie in [first, stop).
            if step and len(reads):
                begin, end = int(reads.k_start.min()), int((reads.k_start + reads.k_len).max())
                first[source] = min(begin, first[source]) if last[source] else begin
                stop[source] = max(end, stop[source])
                last[source] = step
    # Padding lies behind the last sample, so it is the end of a rank's rows.
    real, held = _rows_before(shards, rank, np.array([cu_seqlens[-1], tokens])).tolist()
    return RingSteps(
        rank=rank,
        rows=held,
        padding=slice(real, held),
        reads=tuple(mine),
        first=tuple(first),
        stop=tuple(stop),
        last=tuple(last),
    )


def _reads(cu_seqlens: IntArray, shards: ShardMap, rank: int, source: int) -> AttentionCall:
    """Segments of `rank` on the block of `source`, for one head.

    A fragment of `rank` reads the keys of its samples that lie before it, and in its own block also
    those up to its end.  Ranks 0 1 0, fragments of 4 tokens, one sample [0, 12): rank 1 reads rows
    [0, 4) of rank 0, and rank 0's second fragment reads rows [0, 4) of rank 1.
    """
    found = []
    for mine in np.flatnonzero(shards.rank == rank):
        start, stop = int(shards.start[mine]), int(shards.stop[mine])
        # Step 1: bounds of the samples that have tokens in this fragment.
        low = int(np.searchsorted(cu_seqlens, start, side="right")) - 1
        high = int(np.searchsorted(cu_seqlens, stop, side="left"))
        bounds = cu_seqlens[low : high + 1]
        # Step 2: pack positions of their queries and keys, as rows of the two ranks.
        q_start = np.maximum(bounds[:-1], start)
        q_stop = np.minimum(bounds[1:], stop)
        k_stop = q_stop if rank == source else np.full_like(q_stop, start)
        k_first = _rows_before(shards, source, bounds[:-1])
        k_len = _rows_before(shards, source, k_stop) - k_first
        columns = np.stack([_rows_before(shards, rank, q_start), q_stop - q_start, k_first, k_len])
        found.append(columns[:, (q_stop > q_start) & (k_len > 0)])
    q_row, q_len, k_row, k_len = np.concatenate([np.zeros((4, 0), dtype=np.int64), *found], axis=1)
    head = np.zeros_like(q_row)
    causal = rank == source
    return AttentionCall(q_row, q_len, k_row, k_len, head, head, 1, 1, causal=causal)


def _rows_before(shards: ShardMap, rank: int, position: IntArray) -> IntArray:
    """Rows of a rank before each position of the pack."""
    mine = shards.rank == rank
    start, length = shards.start[mine], (shards.stop - shards.start)[mine]
    # Fragments [0, 4) and [8, 12), position 10: four rows of the first, two of the second.
    inside = np.clip(position[:, None] - start, 0, length)
    rows: IntArray = inside.sum(axis=1)
    return rows
