"""Karmarkar and Karp's largest differencing method with equal cardinality, as verl runs it.

    4 packs of a window, 2 partitions        states: each [heavier set, lighter set]
    9  7  5  1                               {5}{1} spread 4     {9}{7} spread 2
    join crosswise                           {5,7} 12, {1,9} 10  ->  {5,7}{1,9} spread 2

The packs, ascending, are cut into states of K packs, one in each of K sets.  The two states of the
largest spread (heaviest less lightest set) are joined, heaviest set with lightest, until one is
left.  Written from the published method (N. Karmarkar, R. M. Karp: The Differencing Method of Set
Partitioning, 1982).  The start with states of K packs and the ties, sets by (sum, size, members)
and states by (spread, heaviest set), are those of verl's `get_seqlen_balanced_partitions` with
`equal_size=True`, so that its partitions are the same.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """K sets of equally many packs, heaviest first."""

    sums: NDArray[Any]
    """[K]"""
    members: NDArray[np.int64]
    """Packs of each set in the order they came in, [K, size]."""

    @property
    def urgency(self) -> tuple[Any, ...]:
        """Sorts the state that is joined next to the front.

        Heaviest sets of equal sums and sizes differ in their first pack.
        """
        spread, size = self.sums[0] - self.sums[-1], self.members.shape[1]
        return (-spread, -self.sums[0], -size, -self.members[0, 0])


def equal_partitions(workloads: ArrayLike, partitions: int) -> NDArray[np.int64]:
    """Packs grouped into partitions of equal count and like load, int64 [partitions, count].

    The heaviest partition comes first, and each lists its packs by index.  O(D log D).
    """
    weights = np.asarray(workloads)
    ascending = np.argsort(weights, kind="stable").reshape(-1, partitions, 1)
    heap: list[tuple[tuple[Any, ...], State]] = []
    for members in ascending:
        state = heaviest_first(weights[members[:, 0]], members)
        heapq.heappush(heap, (state.urgency, state))
    while len(heap) > 1:
        (_, a), (_, b) = heapq.heappop(heap), heapq.heappop(heap)
        joined = heaviest_first(a.sums + b.sums[::-1], np.hstack([a.members, b.members[::-1]]))
        heapq.heappush(heap, (joined.urgency, joined))
    return np.sort(heap[0][1].members, axis=1)


def heaviest_first(sums: NDArray[Any], members: NDArray[np.int64]) -> State:
    """The state of these sets; of equal sums the one that begins with the later pack is first."""
    order = np.lexsort((-members[:, 0], -sums))
    return State(sums[order], members[order])
