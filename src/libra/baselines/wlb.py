"""WLB-LLM style training: the samples of an optimizer step packed again by cost, then Ulysses.

A window of GBS packs keeps its samples; they are dealt to GBS packs of unequal tokens and like cost
(`libra.simulate.wlb`, the same function that the simulator replays), one a replica and step, and
each runs under `PoolConfig(pool_size=1, placement="ulysses", chunks=1)`.  Nothing is deferred to a
later step.  `libra.baselines.wlb_sampler` feeds a training loop.  After "WLB-LLM: Workload-Balanced
4D Parallelism for Large Language Model Training".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.simulate.wlb import deal_by_cost

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WlbConfig:
    """How packs are made."""

    most_tokens: float = 1.5
    """Most tokens of a pack, over L: what memory leaves beside packs of L tokens."""

    linear_tokens: float = 0.0
    """A token's linear layers cost as much as this many keys; 0 balances attention alone."""

    def __post_init__(self) -> None:
        if not self.most_tokens >= 1:
            raise ValueError(f"WlbConfig.most_tokens is {self.most_tokens}; it must be >= 1")
        if not self.linear_tokens >= 0:
            raise ValueError(f"WlbConfig.linear_tokens is {self.linear_tokens}; it must be >= 0")


def repack_by_cost(lengths: IntArray, packs: int, tokens: int, config: WlbConfig) -> list[IntArray]:
    """Which of a window's fragments each of `packs` packs holds; L is `tokens`."""
    return deal_by_cost(
        lengths, packs, int(config.most_tokens * tokens), linear_tokens=config.linear_tokens
    )
