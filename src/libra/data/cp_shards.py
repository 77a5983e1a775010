"""Tokens of a pack that each context-parallel rank holds, and the labels of its rows.

contiguous, CP 2     0 0 0 0 1 1 1 1
zigzag,     CP 2     0 0 1 1 1 1 0 0        (a head and a tail piece each: equal causal work in one
                                             long sample)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike

from libra.config import ShardLayout, check_choice
from libra.data.lengths import IntArray, check_cu_seqlens

IGNORED_LABEL = -100
"""The target that cross-entropy losses skip."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardMap:
    """The fragments of one pack, ordered by position; they tile [0, tokens) without gap or
    overlap.
    """

    rank: IntArray
    """Context-parallel rank that holds each fragment, [fragments]."""
    start: IntArray
    """First pack position of each fragment."""
    stop: IntArray
    """One past its last pack position."""
    local: IntArray
    """Row of its first token in that rank's local tensors."""


def shard_map(tokens: int, cp_size: int, layout: ShardLayout = "contiguous") -> ShardMap:
    """Fragments of a pack of `tokens` tokens over `cp_size` ranks; sizes differ by one where they
    don't divide.

    Raises ValueError for `tokens` < 1, `cp_size` < 1 or an unknown layout.
    """
    if tokens < 1 or cp_size < 1:
        raise ValueError(f"a pack of {tokens} tokens over CP {cp_size}: both must be >= 1")
    check_choice("layout", layout, get_args(ShardLayout))
    holder = np.arange(cp_size)
    if layout == "zigzag":
        holder = np.append(holder, holder[::-1])
    # Step 1: pieces, one for each entry of `holder`; the first ones get the tokens left over.
    # Ten tokens over CP 2, zigzag: holder 0 1 1 0, lengths 3 3 2 2, stop 3 6 8 10.
    size, longer = divmod(tokens, len(holder))
    lengths = np.full(len(holder), size, dtype=np.int64)
    lengths[:longer] += 1
    stop = np.cumsum(lengths)
    local = np.zeros_like(stop)
    if layout == "zigzag":
        local[cp_size:] = lengths[:cp_size][::-1]  # the tail piece follows the head piece
    start = stop - lengths
    # Step 2: neighbours on one rank (a zigzag's two middle pieces) become one fragment; empty
    # pieces are left out.
    opens = (lengths > 0) & (np.diff(holder, prepend=-1) != 0)
    return ShardMap(
        rank=holder[opens].astype(np.int64),
        start=start[opens],
        stop=np.append(start[opens][1:], tokens),
        local=local[opens],
    )


def local_positions(
    tokens: int, cp_size: int, cp_rank: int, layout: ShardLayout = "contiguous"
) -> IntArray:
    """Pack positions of the rows that rank `cp_rank` holds, in local row order, int64 [rows]."""
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank {cp_rank} is outside [0, {cp_size})")
    shards = shard_map(tokens, cp_size, layout)
    mine = np.flatnonzero(shards.rank == cp_rank)
    mine = mine[np.argsort(shards.local[mine])]
    runs = [np.arange(shards.start[i], shards.stop[i]) for i in mine]
    return np.concatenate([np.empty(0, dtype=np.int64), *runs])


def local_labels(
    token_ids: ArrayLike,
    cu_seqlens: ArrayLike,
    cp_size: int,
    cp_rank: int,
    layout: ShardLayout = "contiguous",
) -> IntArray:
    """Next-token labels of a rank's rows, int64 [rows]; -100 at the end of each sample and in
    padding.

    `token_ids` [tokens] is the whole pack, `cu_seqlens` its sample bounds.  Labels are shifted
    before the shard is taken, because the next token of a shard's last row is on another rank.
    Raises ValueError for bounds that don't fit the pack and a `cp_rank` outside the group.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    bounds = check_cu_seqlens(cu_seqlens, tokens=len(tokens))
    labels = np.full(len(tokens), IGNORED_LABEL, dtype=np.int64)
    labels[:-1] = tokens[1:]
    labels[bounds[1:] - 1] = IGNORED_LABEL
    labels[bounds[-1] :] = IGNORED_LABEL
    return labels[local_positions(len(tokens), cp_size, cp_rank, layout)]
