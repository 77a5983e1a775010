"""The sampler of WLB-LLM style training: packs of unequal tokens and like cost, for one replica."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from libra.baselines.wlb import WlbConfig, repack_by_cost
from libra.data.packing import Packs
from libra.data.sampler import PoolSampler

IntArray = NDArray[np.int64]


class WlbSampler:
    """Fragments of one replica's packs, step by step: the `batch_sampler=` of a loader.

    Windows hold the same packs as `PoolSampler`'s for the same seed and epoch, so an optimizer step
    trains on the same samples.  Iteration yields int64 indices into `packs.lengths` (and
    `packs.samples`, `packs.starts`), of which `cu_seqlens` makes the bounds; every rank of a CP
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
        for window in windows.tolist():
            held = np.concatenate(
                [np.arange(span.start, span.stop) for span in map(self._packs.fragments_of, window)]
            )
            lengths = self._packs.lengths[held]
            dealt = repack_by_cost(lengths, len(window), self._packs.tokens, self._config)
            for pack in dealt[order.dp_rank :: dp_size]:
                yield held[pack]

    def cu_seqlens(self, fragments: IntArray) -> NDArray[np.int32]:
        """Bounds of what iteration yields; their last is the pack's tokens."""
        bounds = np.zeros(len(fragments) + 1, dtype=np.int32)
        np.cumsum(self._packs.lengths[fragments], out=bounds[1:])
        return bounds
