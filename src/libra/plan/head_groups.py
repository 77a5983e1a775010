"""How heads are cut: into head shards, chunks and *head groups*, the heads that travel and compute
as one.

A head group is the widest run of query heads inside one chunk that maps onto whole key/value heads,
or stays inside one.

    8 query heads, 2 key/value heads, H = 1, M = 4      chunk  0 0 1 1 2 2 3 3
                                                        kv     0 0 0 0 1 1 1 1
        -> head groups of 2 heads; kv head groups of 1

    6 query heads, 3 key/value heads, H = 2, M = 1      shard  0 0 0 1 1 1
                                                        kv     0 0 1 1 2 2
        -> head groups of 1 head, so that no query group is split
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from libra.config import HeadShape
from libra.data.lengths import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class KVColumns:
    """The head groups of one head shard that read one kv head group, in order; int64 [columns].

    With 8 head groups, 2 shards and 4 kv head groups a column is 2 head groups.
    """

    shard: IntArray
    kv_head_group: IntArray
    head_group: IntArray
    """First head group."""
    count: IntArray
    """Number of head groups."""


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """The cut of one head shape by H shards and M chunks."""

    heads: int
    """Query heads of a head group."""
    kv_heads: int
    """Key/value heads of a kv head group, the unit in which K and V travel."""
    count: int
    """Head groups in all."""
    kv_count: int
    """kv head groups in all."""
    per_shard: int
    """Head groups of one head shard."""
    per_chunk: int
    """Head groups of one head shard in one chunk."""
    group: int
    """Query heads per key/value head."""

    def kv_head_group(self, head_group: IntArray) -> IntArray:
        """The kv head group that each head group reads."""
        return head_group * self.heads // (self.group * self.kv_heads)

    def chunk(self, head_group: IntArray) -> IntArray:
        """The chunk in which each head group computes."""
        return head_group % self.per_shard // self.per_chunk

    @property
    def chunks(self) -> int:
        """M."""
        return self.per_shard // self.per_chunk

    @property
    def shards(self) -> int:
        """H."""
        return self.count // self.per_shard

    def kv_columns(self) -> KVColumns:
        """Head groups by (head shard, kv head group)."""
        head_group = np.arange(self.count, dtype=np.int64)
        key = head_group // self.per_shard * self.kv_count + self.kv_head_group(head_group)
        key, first, count = np.unique(key, return_index=True, return_counts=True)
        return KVColumns(key // self.kv_count, key % self.kv_count, first, count)

    @property
    def kv_done(self) -> tuple[int, ...]:
        """Last chunk that reads each chunk's kv buffer, on any worker and wherever tiles are."""
        head_group = np.arange(self.count, dtype=np.int64)
        chunk, kv_head_group = self.chunk(head_group), self.kv_head_group(head_group)
        # The last chunk that reads each kv head group, then the last of those that a chunk fetches.
        last = np.zeros(self.kv_count, dtype=np.int64)
        np.maximum.at(last, kv_head_group, chunk)
        done = np.arange(self.chunks, dtype=np.int64)
        np.maximum.at(done, chunk, last[kv_head_group])
        return tuple(done.tolist())


def cut_heads(heads: HeadShape, head_shards: int, chunks: int) -> HeadGroups:
    """Cut `heads` into `head_shards` shards of `chunks` pieces.  Raises ValueError where they don't
    divide.
    """
    if heads.q % head_shards:
        raise ValueError(
            f"{heads.q} query heads cannot be cut into {head_shards} head shards; "
            "choose PoolConfig.head_shards (H) that divides the query heads"
        )
    width = heads.q // head_shards
    if width % chunks:
        raise ValueError(
            f"a head shard of {width} query heads ({heads.q} / H={head_shards}) cannot be cut into "
            f"{chunks} chunks; "
            "choose PoolConfig.chunks (M) that divides query heads / H"
        )
    piece = width // chunks  # query heads of one shard in one chunk
    # A piece of whole query groups travels as one; a smaller one, or one that splits a group, as
    # the largest runs of heads that stay inside one group: gcd(piece, group) heads.
    whole_groups = piece % heads.group == 0
    head_group = piece if whole_groups else math.gcd(piece, heads.group)
    kv_head_group = piece // heads.group if whole_groups else 1
    return HeadGroups(
        heads=head_group,
        kv_heads=kv_head_group,
        count=heads.q // head_group,
        kv_count=heads.kv // kv_head_group,
        per_shard=width // head_group,
        per_chunk=piece // head_group,
        group=heads.group,
    )
