"""Who attends to what at each step of a ring, from sample bounds alone.

    rank          0      1      2      3          step 0: every rank attends to its own block
    holds         a      b      c      d          step 1: rank 0 holds d, rank 1 holds a, ..
    step 1        d      a      b      c          zigzag: a rank's late rows need most blocks, its
    step 2        c      d      a      b          early rows few, and all ranks about as many
    step 3        b      c      d      a

At step s rank r holds the block (keys and values) of rank r - s.  A rank's rows lie in order of
position, so the keys of one sample before any position are one run of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.config import ShardLayout
from libra.data.cp_shards import ShardMap, shard_map
from libra.plan.attention_calls import AttentionCall

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Query rows of one rank and the key rows of one block that they see; int64 [reads]."""

    q_start: IntArray
    q_len: IntArray
    k_start: IntArray
    k_len: IntArray

    def segments(self, first: int, heads: int, kv_heads: int, *, causal: bool) -> AttentionCall:
        """As one kernel call on a block that starts at its row `first`."""
        none = np.zeros_like(self.q_start)
        return AttentionCall(
            q_start=self.q_start,
            q_len=self.q_len,
            k_start=self.k_start - first,
            k_len=self.k_len,
            q_head=none,
            kv_head=none,
            heads=heads,
            kv_heads=kv_heads,
            causal=causal,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RingSteps:
    """One pack's ring as one rank sees it; `first`, `stop` and `last` are alike on all ranks."""

    rank: int
    rows: int
    """Rows of this rank."""
    padding: IntArray
    """Rows of this rank that lie behind the last sample."""
    reads: tuple[Reads, ...]
    """What this rank attends to at each step, [ranks]; causal at step 0, full rectangles after."""
    first: tuple[int, ...]
    """First row of each rank's block that another rank reads."""
    stop: tuple[int, ...]
    """One past the last; nothing else of a block travels."""
    last: tuple[int, ...]
    """Last step at which a rank reads each block; 0 where it stays at home."""

    @property
    def ranks(self) -> int:
        return len(self.first)

    @property
    def after(self) -> int:
        """The rank that blocks go to."""
        return (self.rank + 1) % self.ranks

    @property
    def before(self) -> int:
        """The rank that they come from."""
        return (self.rank - 1) % self.ranks

    def source(self, step: int) -> int:
        """Whose block this rank holds at a step."""
        return (self.rank - step) % self.ranks

    def shared(self, source: int) -> int:
        """Rows of a block that travel."""
        return self.stop[source] - self.first[source]


def ring_steps(
    cu_seqlens: IntArray, tokens: int, ranks: int, rank: int, layout: ShardLayout
) -> RingSteps:
    """The ring of a pack of `tokens` tokens with checked sample bounds."""
    shards = shard_map(tokens, ranks, layout)
    first, stop, last = [0] * ranks, [0] * ranks, [0] * ranks
    mine: list[Reads] = []
    for step in range(ranks):
        for reader in range(ranks):
            source = (reader - step) % ranks
            reads = _reads(cu_seqlens, shards, reader, source)
            if reader == rank:
                mine.append(reads)
            if step and len(reads.q_start):
                begin, end = int(reads.k_start.min()), int((reads.k_start + reads.k_len).max())
                first[source] = min(begin, first[source]) if last[source] else begin
                stop[source] = max(end, stop[source])
                last[source] = step
    held = int(_rows_before(shards, rank, np.array([tokens]))[0])
    real = int(_rows_before(shards, rank, cu_seqlens[-1:])[0])
    return RingSteps(
        rank=rank,
        rows=held,
        padding=np.arange(real, held),
        reads=tuple(mine),
        first=tuple(first),
        stop=tuple(stop),
        last=tuple(last),
    )


def _reads(cu_seqlens: IntArray, shards: ShardMap, rank: int, source: int) -> Reads:
    """Keys that `rank` reads in the block of `source`: those before a fragment of its own, or, of
    its own, all up to the fragment's end.
    """
    found = []
    for mine in np.flatnonzero(shards.rank == rank):
        start, stop = int(shards.start[mine]), int(shards.stop[mine])
        low = int(np.searchsorted(cu_seqlens, start, side="right")) - 1
        high = int(np.searchsorted(cu_seqlens, stop, side="left"))
        bounds = cu_seqlens[low : high + 1]  # of the samples that the fragment meets
        q_start = np.maximum(bounds[:-1], start)
        q_stop = np.minimum(bounds[1:], stop)
        k_stop = q_stop if rank == source else np.full_like(q_stop, start)
        k_first = _rows_before(shards, source, bounds[:-1])
        k_len = _rows_before(shards, source, k_stop) - k_first
        columns = np.stack([_rows_before(shards, rank, q_start), q_stop - q_start, k_first, k_len])
        found.append(columns[:, (q_stop > q_start) & (k_len > 0)])
    q_row, q_len, k_row, k_len = np.concatenate([np.zeros((4, 0), dtype=np.int64), *found], axis=1)
    return Reads(q_row, q_len, k_row, k_len)


def _rows_before(shards: ShardMap, rank: int, position: IntArray) -> IntArray:
    """How many rows of a rank lie before each position of the pack."""
    mine = shards.rank == rank
    start, length = shards.start[mine], (shards.stop - shards.start)[mine]
    inside = np.clip(position[:, None] - start, 0, length)
    rows: IntArray = inside.sum(axis=1)
    return rows
