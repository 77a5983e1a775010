"""The samples that each scheme runs at every step of a window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.baselines.wlb import WlbConfig, repack_by_cost
from libra.data.packing import Packs
from libra.simulate.schemes import Scheme

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One microbatch of every replica, [DP]."""

    fragments: tuple[IntArray, ...]
    """Indices into the window's fragments, in the order of the pack."""
    tokens: tuple[int, ...]
    """Tokens of each pack, padding included."""

    def cu_seqlens(self, window: Packs, replica: int) -> IntArray:
        """Sample bounds of a replica's pack, int64."""
        return np.append(0, np.cumsum(window.lengths[self.fragments[replica]]))


def window_steps(
    window: Packs, scheme: Scheme, *, dp_size: int, pool_size: int, wlb: WlbConfig
) -> list[Step]:
    """Every step of a window of GBS packs; `pool_size` is the scheme's.

    Raises ValueError for sizes that don't divide, and where WLB's packs cannot take the samples.
    """
    if len(window) % dp_size:
        raise ValueError(
            f"global_batch={len(window)} packs over {dp_size} replicas: replicas must divide "
            "global_batch"
        )
    if scheme.packing == "by-cost":
        packs = repack_by_cost(window.lengths, len(window), window.tokens, wlb)
        tokens = [int(window.lengths[pack].sum()) for pack in packs]
    else:
        # Row by row of [steps, DP], the packs of one step stand next to each other.
        order = scheme.pools(window.workloads, pool_size, dp_size // pool_size).ravel().tolist()
        spans = map(window.pieces_of, order)
        packs = [np.arange(span.start, span.stop) for span in spans]
        tokens = [window.tokens] * len(packs)
    return [
        Step(
            fragments=tuple(packs[first : first + dp_size]),
            tokens=tuple(tokens[first : first + dp_size]),
        )
        for first in range(0, len(packs), dp_size)
    ]
