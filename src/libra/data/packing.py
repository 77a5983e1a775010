"""Samples to packs of L tokens: cut at pack ends for pre-training, or whole for fine-tuning.

pack_sequential    |aaaaabbb|bbbbcccc|ccd.....     a sample is cut at a pack's end
pack_best_fit      |aaaaacc.|bbbbbbb.|ddddee..     samples stay whole; the rest is padding
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import check_choice, check_count
from libra.data.lengths import IntArray, check_lengths, segment_workloads

Packing = Literal["sequential", "best-fit"]
LongerCut = Literal["refuse", "drop", "cut"]
LongerWhole = Literal["refuse", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs:
    """Packs, in flat arrays.

    A *piece* is the part of a sample that lies in one pack: all of it unless packing cuts it.
    Pack i holds the pieces offsets[i] .. offsets[i + 1] - 1; they fill its row of `tokens` tokens
    from the start, and padding, if any, comes last.  Iterating gives each pack's lengths.
    """

    tokens: int
    """L: tokens of every pack, padding included."""
    lengths: IntArray
    """Tokens of each piece, [pieces]."""
    offsets: IntArray
    """First piece of each pack, then their number, [packs + 1]."""
    samples: IntArray
    """Index of each piece's sample in the lengths that were packed, [pieces]."""
    starts: IntArray
    """First token of each piece in its sample, [pieces]."""
    dropped_samples: int = 0
    """Samples left out because they are longer than L."""
    dropped_tokens: int = 0
    """Tokens at the corpus's end left out because they don't fill a pack."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[IntArray]:
        return (self.lengths_of(i) for i in range(len(self)))

    def pieces_of(self, pack: int) -> slice:
        """Where a pack's pieces lie in the flat arrays.  IndexError for a pack out of range."""
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        return slice(int(self.offsets[pack]), int(self.offsets[pack + 1]))

    def lengths_of(self, pack: int) -> IntArray:
        """Sample lengths of a pack as its attention sees them, int64 [its pieces], a view."""
        return self.lengths[self.pieces_of(pack)]

    def cu_seqlens(self, pack: int) -> NDArray[np.int32]:
        """Sample bounds of a pack from 0 to its real tokens, int32; padding lies after the end."""
        lengths = self.lengths_of(pack)
        bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=bounds[1:])
        return bounds

    @property
    def padding(self) -> IntArray:
        """Padding tokens of each pack, int64 [packs]."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])[self.offsets]
        return np.asarray(self.tokens - np.diff(ends))

    @property
    def workloads(self) -> IntArray:
        """Sum of squared lengths of each pack, int64 [packs]."""
        return segment_workloads(self.lengths, self.offsets)


def pack_sequential(
    lengths: ArrayLike, tokens: int, *, longer: LongerCut = "refuse", drop_last: bool = True
) -> Packs:
    """Concatenate samples in order and cut every `tokens` tokens.

    Each piece of a cut sample is a sample of its own.  `longer` says how samples of more than
    `tokens` tokens are treated: `refuse` them, `drop` them (counted in `dropped_samples`), or `cut`
    them like any other.  The last, incomplete pack is dropped (counted in `dropped_tokens`), or
    padded with `drop_last=False`.  Vectorised.

    Raises ValueError for an empty corpus, bad lengths, L out of [1, 2^31), or a corpus that fills
    no pack.
    """
    kept, ids, dropped = _choose_samples(lengths, tokens, longer, get_args(LongerCut))
    ends = np.cumsum(kept)
    total = int(ends[-1])
    packs = total // tokens if drop_last else -(-total // tokens)
    if not packs:
        raise ValueError(
            f"the corpus has {total} tokens, less than one pack of tokens={tokens}; "
            "pack shorter, or keep the incomplete pack with drop_last=False"
        )
    # Step 1: pieces end where a sample ends and where a pack ends.  Lengths 5 7 4 in packs of 8:
    # samples end at 5 12 16, packs at 8 16, pieces at 5 8 12 16.
    used = min(total, packs * tokens)
    pack_ends = np.arange(1, packs, dtype=np.int64) * tokens
    where = np.searchsorted(ends, pack_ends)
    inside = ends[where] != pack_ends  # a sample that ends with its pack is not cut
    stops = np.insert(ends, where[inside], pack_ends[inside])
    stops = stops[: np.searchsorted(stops, used) + 1]
    stops[-1] = used  # a sample that crosses the end of the last pack loses its rest
    starts = np.concatenate([[0], stops[:-1]])
    # Step 2: the sample of each piece is the first that ends behind the piece's start.
    sample = np.searchsorted(ends, starts, side="right")
    return Packs(
        tokens=tokens,
        lengths=stops - starts,
        offsets=np.searchsorted(starts, np.concatenate([[0], pack_ends, [used]])),
        samples=ids[sample],
        starts=starts - (ends - kept)[sample],
        dropped_samples=dropped,
        dropped_tokens=total - used,
    )


def pack_best_fit(
    lengths: ArrayLike, tokens: int, *, longer: LongerWhole = "refuse", buffer: int = 4096
) -> Packs:
    """Fill packs with whole samples from a bounded buffer, best fit; the rest of a pack is padding.

    A pack starts with the oldest sample of the buffer, so none waits for more than `buffer` packs;
    then the longest sample that fits is added (the oldest of equals) until none fits.  Samples
    enter the buffer in order, whenever a 16th of it is used: seldom enough to be fast, often enough
    that heavy packs don't come in clusters.  A larger buffer pads less and reorders more; the
    padding is in `Packs.padding`.  `longer`: `refuse` or `drop` samples of more than `tokens`
    tokens.

    Raises ValueError for an empty corpus, bad lengths, L out of [1, 2^31), or `buffer` < 1.
    """
    from libra.data.packing_kernels import fill_packs  # numba: half a second to import

    check_count("buffer", buffer)
    kept, ids, dropped = _choose_samples(lengths, tokens, longer, get_args(LongerWhole))
    order, opens, _ = fill_packs(kept, tokens, buffer, max(1, buffer // 16))
    return Packs(
        tokens=tokens,
        lengths=kept[order],
        offsets=np.append(np.flatnonzero(opens), len(order)),
        samples=ids[order],
        starts=np.zeros(len(order), dtype=np.int64),
        dropped_samples=dropped,
    )


def _choose_samples(
    lengths: ArrayLike, tokens: int, longer: str, choices: tuple[str, ...]
) -> tuple[IntArray, IntArray, int]:
    """Check a packer's arguments; lengths of the samples to pack, their indices in `lengths`, and
    how many were dropped as too long.
    """
    if check_count("tokens", tokens) >= 2**31:
        raise ValueError(f"tokens is {tokens}; L must be less than 2^31, for cu_seqlens are int32")
    check_choice("longer", longer, choices)
    checked = check_lengths(lengths)
    if not len(checked):
        raise ValueError("the corpus is empty: lengths holds no sample")
    ids = np.arange(len(checked), dtype=np.int64)
    too_long = checked > tokens
    count = int(too_long.sum())
    if not count or longer == "cut":
        return checked, ids, 0
    if longer == "refuse":
        i = int(np.argmax(too_long))
        others = " or ".join(f"longer={choice!r}" for choice in choices if choice != "refuse")
        raise ValueError(
            f"lengths[{i}] is {checked[i]}, longer than a pack of tokens={tokens} "
            f"({count} of {len(checked)} samples are); choose {others}, or a larger tokens"
        )
    if count == len(checked):
        raise ValueError(
            f"all {count} samples are longer than a pack of tokens={tokens}; choose a larger one"
        )
    return checked[~too_long], ids[~too_long], count
