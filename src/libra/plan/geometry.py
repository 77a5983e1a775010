"""Where everything of a pool lies: samples, the fragments that workers hold, and the blocks that
tiles are cut from.

    pool position   0             tokens         2 * tokens
    packs           |   pack 0    |    pack 1    |
    samples         | a |    b    |  c  | d |  e |
    fragments       | 0  |  1     |  2   |  3    |     rows of one pack at one worker
    blocks          |  |  |   |   |  |   |   |   |     cut at every fragment start

Positions are *pool positions*: packs one after the other, pack p at [p * tokens, (p + 1) * tokens).
Worker p * CP + c is rank c of the CP group that holds pack p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import ShardLayout
from libra.data.cp_shards import shard_map
from libra.data.lengths import IntArray, causal_pairs, check_cu_seqlens

_LONG_RUN: Final = 256
"""Mean values in a range from which `spread` writes range by range."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A table whose fields are its columns, arrays of one length."""

    def take(self, index: IntArray | NDArray[np.bool_]) -> Self:
        """The rows of an index or of a mask."""
        return type(self)(*(getattr(self, column.name)[index] for column in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps(Columns):
    """Where intervals of two kinds overlap, ordered by position."""

    left: IntArray
    """Index into the first kind, int64 [overlaps]."""
    right: IntArray
    """Index into the second kind."""
    start: IntArray
    stop: IntArray


def _none() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Geometry:
    """A pool's samples, fragments and blocks; all int64, positions in pool coordinates."""

    cu_seqlens: tuple[IntArray, ...]
    """Sample bounds of each pack, zero-length samples dropped."""
    tokens: int
    """L, tokens of one pack, padding included."""
    packs: int
    cp_size: int
    rows: IntArray
    """Local rows of each worker, [workers]."""
    sample_start: IntArray
    sample_stop: IntArray
    fragment_worker: IntArray
    fragment_start: IntArray
    fragment_local: IntArray
    """Row of a fragment's first token at its worker."""
    pack_stop: IntArray
    """Pool position at which each pack's real tokens end, [packs]."""
    sample_shards: Overlaps
    """Samples (left) and the fragments (right) that hold them, ordered by sample, then position."""
    # Empty until `with_cuts` cuts blocks.
    block_start: IntArray = field(default_factory=_none)
    """Blocks cover the pool."""
    block_stop: IntArray = field(default_factory=_none)
    """Blocks end with the real tokens; a block of padding is empty."""
    block_worker: IntArray = field(default_factory=_none)
    """Q-home of each block."""
    block_local: IntArray = field(default_factory=_none)
    """Row of a block's first token at its Q-home."""
    block_pairs: IntArray = field(default_factory=_none)
    """Causal query-key pairs of each block, one head."""
    block_samples: Overlaps = field(default_factory=lambda: Overlaps(*[_none()] * 4))
    """Blocks (left) and the samples (right) that they hold rows of, ordered by position."""

    @property
    def workers(self) -> int:
        """W = P * CP."""
        return self.packs * self.cp_size


def pool_geometry(
    cu_seqlens_per_pack: Sequence[ArrayLike],
    *,
    cp_size: int,
    layout: ShardLayout = "contiguous",
    tokens: int | None = None,
) -> Geometry:
    """Lay out a pool of packs; every fragment is a block until `with_cuts` cuts it.

    `tokens` is L; None takes the common end of all `cu_seqlens`.  Rows of a pack after the end of
    its cu_seqlens are padding and cost nothing.  Raises ValueError for an empty pool, packs of
    different L or lengths that don't fit.
    """
    if not len(cu_seqlens_per_pack):
        raise ValueError("a pool needs the cu_seqlens of at least one pack; got none")
    bounds = tuple(check_cu_seqlens(cu, tokens=tokens) for cu in cu_seqlens_per_pack)
    tokens = _common_end(bounds) if tokens is None else tokens
    # Step 1: the fragments of one pack, repeated for each.
    packs, shards = len(bounds), shard_map(tokens, cp_size, layout)
    offset = np.arange(packs, dtype=np.int64)[:, None] * tokens
    fragment_start, fragment_stop = (shards.start + offset).ravel(), (shards.stop + offset).ravel()
    fragment_worker = (shards.rank + np.arange(packs)[:, None] * cp_size).ravel()

    # Step 2: samples, and which fragments hold them.
    sample_start = np.concatenate([cu[:-1] + p * tokens for p, cu in enumerate(bounds)])
    sample_stop = np.concatenate([cu[1:] + p * tokens for p, cu in enumerate(bounds)])
    without_blocks = Geometry(
        cu_seqlens=bounds,
        tokens=tokens,
        packs=packs,
        cp_size=cp_size,
        rows=scatter_add((packs * cp_size,), fragment_worker, fragment_stop - fragment_start),
        sample_start=sample_start,
        sample_stop=sample_stop,
        fragment_worker=fragment_worker,
        fragment_start=fragment_start,
        fragment_local=np.tile(shards.local, packs),
        pack_stop=np.array([cu[-1] for cu in bounds], dtype=np.int64) + offset.ravel(),
        sample_shards=_overlap(sample_start, sample_stop, fragment_start, fragment_stop),
    )
    return with_cuts(without_blocks, fragment_start)


def _common_end(bounds: Sequence[IntArray]) -> int:
    """The token at which all packs end."""
    ends = {int(cu[-1]) for cu in bounds}
    if len(ends) > 1:
        raise ValueError(
            f"packs of one pool end at different tokens: {sorted(ends)}; every pack holds the "
            "same L (pass tokens=L where the rest of a pack is padding)"
        )
    return ends.pop()


def uniform_cuts(geometry: Geometry, block_size: int) -> IntArray:
    """Cuts at every multiple of `block_size` in each pack and at every fragment start, int64."""
    pack_start = np.arange(geometry.packs, dtype=np.int64) * geometry.tokens
    multiples = pack_start[:, None] + np.arange(0, geometry.tokens, block_size, dtype=np.int64)
    return np.union1d(multiples, geometry.fragment_start)


def with_cuts(geometry: Geometry, cuts: IntArray) -> Geometry:
    """The same pool with its blocks cut at the ascending pool positions `cuts`, every fragment
    start among them.
    """
    # Step 1: blocks end at the next cut, or where the real tokens of their pack end.
    block_end = np.append(cuts[1:], geometry.tokens * geometry.packs)
    pack_stop = geometry.pack_stop[cuts // geometry.tokens]
    block_stop = np.maximum(np.minimum(block_end, pack_stop), cuts)
    # Step 2: the fragment that holds each block, and the pairs of its samples.
    home = np.searchsorted(geometry.fragment_start, cuts, side="right") - 1
    block_samples = _overlap(cuts, block_stop, geometry.sample_start, geometry.sample_stop)
    first_query = block_samples.start - geometry.sample_start[block_samples.right]
    pairs = causal_pairs(first_query, first_query + block_samples.stop - block_samples.start)
    return replace(
        geometry,
        block_start=cuts,
        block_stop=block_stop,
        block_worker=geometry.fragment_worker[home],
        block_local=geometry.fragment_local[home] + cuts - geometry.fragment_start[home],
        block_pairs=scatter_add(cuts.shape, block_samples.left, pairs),
        block_samples=block_samples,
    )


def _overlap(
    left_start: IntArray, left_stop: IntArray, right_start: IntArray, right_stop: IntArray
) -> Overlaps:
    """Overlaps of two lists of disjoint, ascending intervals, in ascending order."""
    # A left interval [5, 9) among right ones [0, 3) [3, 6) [6, 8) [8, 12): the first that ends
    # after 5 is number 1, the first that starts at 9 or later would be number 4, so it overlaps 1,
    # 2 and 3.
    low = np.searchsorted(right_stop, left_start, side="right")
    high = np.maximum(np.searchsorted(right_start, left_stop, side="left"), low)
    # Empty intervals, those of padding, overlap nothing.
    high = np.where(left_stop > left_start, high, low)
    count = high - low
    left = np.repeat(np.arange(len(left_start)), count)
    right = spread(low, count)
    return Overlaps(
        left=left,
        right=right,
        start=np.maximum(left_start[left], right_start[right]),
        stop=np.minimum(left_stop[left], right_stop[right]),
    )


def spread(start: IntArray, count: IntArray, step: int = 1) -> IntArray:
    """Concatenate the ranges start_i, start_i + step, ... of count_i values each; int64."""
    stop = np.cumsum(count)
    total = int(stop[-1]) if len(stop) else 0
    if total > _LONG_RUN * len(count):  # one write a range: three passes over memory cost more
        ranges = np.empty(total, dtype=np.int64)
        for first, length, end in zip(start.tolist(), count.tolist(), stop.tolist(), strict=True):
            ranges[end - length : end] = np.arange(first, first + step * length, step)
        return ranges
    # start 5 9, count 3 2, step 1:  repeat 5 5 5 6 6, plus 0 1 2 3 4  ->  5 6 7 9 10
    ranges = np.repeat(start - step * (stop - count), count)
    ranges += np.arange(0, step * total, step)
    return ranges


def range_starts(length: IntArray, buffer: NDArray[np.integer]) -> IntArray:
    """Where ranges start that fill buffers one after the other; int64.

    The ranges of one buffer stand side by side:  length 2 3 4 1, buffer 5 5 7 7  ->  0 2 0 4.
    """
    start = np.cumsum(length) - length
    first, last = run_bounds(differs(buffer))
    return np.asarray(start - np.repeat(start[first], last - first + 1))


def scatter_add(
    shape: tuple[int, ...], at: NDArray[Any] | tuple[NDArray[Any], ...], values: IntArray
) -> IntArray:
    """An array of `shape` that holds the sum of the values at each index, int64."""
    sums = np.zeros(shape, dtype=np.int64)
    flat = np.ravel_multi_index(at, shape) if isinstance(at, tuple) else at
    np.add.at(sums.reshape(-1), flat, values)
    return sums


def differs(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each entry differs from the one before it; the first does."""
    new = np.ones(len(column), dtype=np.bool_)
    new[1:] = column[1:] != column[:-1]
    return new


def run_bounds(opens: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """First and last entry of each run, where `opens` says which entries begin one."""
    first = np.flatnonzero(opens)
    return first, np.append(first, len(opens))[1:] - 1
