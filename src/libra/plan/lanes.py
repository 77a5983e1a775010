"""How heads are cut: head shards, chunks, and lanes, the head pieces that travel and compute as
one.

A *lane* is the widest run of query heads inside one chunk that maps onto whole key/value heads, or
stays inside one.

    8 query heads, 2 key/value heads, H = 1, M = 4:   chunk  0 0 1 1 2 2 3 3
                                                      kv     0 0 0 0 1 1 1 1     lanes of 2 heads,
                                                      kv lanes of 1
    6 query heads, 3 key/value heads, H = 2, M = 1:   shard  0 0 0 1 1 1
                                                      kv     0 0 1 1 2 2         lanes of 1 head: no
                                                      group is torn
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lanes:
    """The cut of one head shape by H shards and M chunks."""

    heads: int
    """Query heads of a lane."""
    kv_heads: int
    """Key/value heads of a kv lane, the unit in which K and V travel."""
    count: int
    """Query lanes in all."""
    kv_count: int
    """kv lanes in all."""
    per_shard: int
    """Query lanes of one head shard."""
    per_chunk: int
    """Query lanes of one head shard in one chunk."""
    group: int
    """Query heads per key/value head."""

    def kv_lane(self, lane: IntArray) -> IntArray:
        """The kv lane that each query lane reads."""
        return lane * self.heads // (self.group * self.kv_heads)

    def chunk(self, lane: IntArray) -> IntArray:
        """The chunk in which each query lane computes."""
        return lane % self.per_shard // self.per_chunk

    @property
    def chunks(self) -> int:
        """M."""
        return self.per_shard // self.per_chunk

    @property
    def shards(self) -> int:
        """H."""
        return self.count // self.per_shard


def cut_lanes(heads: HeadShape, head_shards: int, chunks: int) -> Lanes:
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
    piece = width // chunks
    whole_groups = piece % heads.group == 0
    lane = piece if whole_groups else math.gcd(piece, heads.group)
    kv_lane = piece // heads.group if whole_groups else 1
    return Lanes(
        heads=lane,
        kv_heads=kv_lane,
        count=heads.q // lane,
        kv_count=heads.kv // kv_lane,
        per_shard=width // lane,
        per_chunk=piece // lane,
        group=heads.group,
    )
