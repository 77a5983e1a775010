"""WLB-LLM style training: the samples of an optimizer step packed again by cost, then Ulysses.

A window of GBS packs keeps its samples.  They are assigned to as many packs again, longest first,
each to the pack that costs least so far and has room for it, so packs have unequal tokens and
similar cost.  A pack may hold more than L tokens, up to a limit that memory sets.  Nothing is
deferred to a later step, so a sample that outweighs a pack stays an outlier.  Each pack then runs
under `PoolConfig(pool_size=1, placement="ulysses", chunks=1)`, one a replica and step.

`WlbSampler` feeds a training loop; the simulator replays the same packing.  After "WLB-LLM:
Workload-Balanced 4D Parallelism for Large Language Model Training".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.config import check_count
from libra.data.lengths import IntArray, check_lengths
from libra.data.packing import Packs
from libra.data.sampler import PoolSampler
from libra.plan.geometry import spread

MOST_TOKENS: Final = 1.5
"""Most tokens of a pack over L, unless another limit is given.  An assumption: the memory that is
left next to packs of L tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WlbConfig:
    """How packs are made."""

    most_tokens: float = MOST_TOKENS
    """Most tokens of a pack, in multiples of L."""

    linear_tokens: float = 0.0
    """A token's linear layers cost as much as this many keys; 0 balances attention alone."""

    def __post_init__(self) -> None:
        if not self.most_tokens >= 1:
            raise ValueError(f"WlbConfig.most_tokens is {self.most_tokens}; it must be >= 1")
        if not self.linear_tokens >= 0:
            raise ValueError(f"WlbConfig.linear_tokens is {self.linear_tokens}; it must be >= 0")


def pack_by_cost(lengths: IntArray, packs: int, tokens: int, config: WlbConfig) -> list[IntArray]:
    """Indices into `lengths` that each of `packs` packs holds, longest first; L is `tokens`.

    A sample of l tokens costs l^2 + `linear_tokens` * l: a token's linear layers cost as much as
    that many keys.  Deterministic; O(samples log packs).

    Raises ValueError where a sample has more tokens than a pack may hold, or where the samples do
    not fit, which first-fit by cost finds when packs are nearly full: raise `most_tokens`.
    """
    check_count("packs", packs)
    most_tokens = int(config.most_tokens * check_count("tokens", tokens))
    checked = check_lengths(lengths)
    order = np.argsort(-checked, kind="stable")
    ranked = checked[order].tolist()
    if ranked and ranked[0] > most_tokens:
        raise ValueError(f"a sample has {ranked[0]} tokens, more than most_tokens={most_tokens}")
    # A heap of (cost, pack): the cheapest pack comes first, of equal ones the first.
    open_packs = [(0.0, pack) for pack in range(packs)]
    filled = [0] * packs
    held: list[list[int]] = [[] for _ in range(packs)]
    for sample, length in zip(order.tolist(), ranked, strict=True):
        passed = []  # cheaper packs that lack room for this sample
        while open_packs:
            cost, pack = heapq.heappop(open_packs)
            if filled[pack] + length <= most_tokens:
                held[pack].append(sample)
                filled[pack] += length
                heapq.heappush(open_packs, (cost + length * (length + config.linear_tokens), pack))
                break
            # A full pack leaves the heap for good.
            if filled[pack] < most_tokens:
                passed.append((cost, pack))
        else:
            raise ValueError(
                f"{packs} packs of at most {most_tokens} tokens cannot take a sample of {length} "
                "more; raise most_tokens"
            )
        # A shorter sample may still fit into them.
        for entry in passed:
            heapq.heappush(open_packs, entry)
    return [np.array(pack, dtype=np.int64) for pack in held]


class WlbSampler:
    """Fragments of one replica's packs by cost, step by step: the `batch_sampler=` of a loader.

    Windows hold the same packs as `PoolSampler`'s for the same seed and epoch, so an optimizer step
    trains on the same samples.  Iteration yields int64 indices into `packs.lengths` (and
    `packs.samples`, `packs.starts`), from which `cu_seqlens` makes the bounds; every rank of a CP
    group yields the same.

    Raises ValueError as `PoolSampler` does; iterating, where a window's samples do not fit.
    """

    def __init__(
        self,
        packs: Packs,
        *,
        global_batch: int,
        dp_rank: int,
        dp_size: int,
        config: WlbConfig | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._packs = packs
        self._config = config or WlbConfig()
        self._order = PoolSampler(
            packs,
            global_batch=global_batch,
            dp_rank=dp_rank,
            dp_size=dp_size,
            pool_size=1,
            shuffle=shuffle,
            seed=seed,
            placement="contiguous",
        )

    def __len__(self) -> int:
        return len(self._order)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`."""
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[IntArray]:
        order, dp_size = self._order, self._order.dp_size
        windows = order.schedule().reshape(order.windows, order.global_batch)
        for window in windows:
            held = spread(self._packs.offsets[window], np.diff(self._packs.offsets)[window])
            lengths, tokens = self._packs.lengths[held], self._packs.tokens
            packs = pack_by_cost(lengths, len(window), tokens, self._config)
            for pack in packs[order.dp_rank :: dp_size]:
                yield held[pack]

    def cu_seqlens(self, fragments: IntArray) -> NDArray[np.int32]:
        """Sample bounds of one pack that iteration yields; the last bound is the pack's tokens."""
        return np.append(0, np.cumsum(self._packs.lengths[fragments])).astype(np.int32)
