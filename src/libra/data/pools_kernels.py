"""Pairwise swaps of packs between pools, compiled.  Imported only by `pools.refine_pools`."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import IntArray


@numba.njit(cache=True)
def swap_packs(pools: IntArray, weights: NDArray[Any], loads: NDArray[Any], searches: int) -> int:
    """Swap packs until no swap helps or `searches` pools have been searched; the number of swaps.

    `pools` [K, P], each row by decreasing weight, ties by index; `weights` [K, P] of those packs;
    `loads` [K].  All are changed in place, the order inside rows is kept.

    The heaviest pool that is not stuck makes the swap that leaves the smallest maximum of the two
    loads, the first found of equals.  A pool without such a swap is stuck.  When all are stuck, the
    pools are searched again for swaps with pools that have changed since.
    """
    stuck = np.zeros(len(loads), dtype=np.bool_)
    searched_at = np.full(len(loads), -1)  # number of swaps made when the pool got stuck
    changed_at = np.zeros(len(loads), dtype=np.int64)  # number of the pool's latest swap
    swaps, swaps_before = 0, -1
    for _ in range(searches):
        heavy = _heaviest(loads, stuck)
        if heavy < 0:
            if swaps == swaps_before:
                break
            swaps_before = swaps
            stuck[:] = False
            heavy = _heaviest(loads, stuck)
        other, mine, theirs = _best_swap(weights, loads, heavy, changed_at, searched_at[heavy])
        if other < 0:
            stuck[heavy] = True
            searched_at[heavy] = swaps
            continue
        swaps += 1
        changed_at[heavy] = swaps
        changed_at[other] = swaps
        given, given_weight = pools[heavy, mine], weights[heavy, mine]
        received, received_weight = pools[other, theirs], weights[other, theirs]
        loads[heavy] -= given_weight - received_weight
        loads[other] += given_weight - received_weight
        _replace(pools[heavy], weights[heavy], mine, received, received_weight)
        _replace(pools[other], weights[other], theirs, given, given_weight)
    return swaps


@numba.njit(cache=True)
def _heaviest(loads: NDArray[Any], stuck: NDArray[np.bool_]) -> int:
    """The first of the heaviest pools that are not stuck; -1 where all are."""
    found = -1
    for k in range(len(loads)):
        if not stuck[k] and (found < 0 or loads[k] > loads[found]):
            found = k
    return found


@numba.njit(cache=True)
def _best_swap(
    weights: NDArray[Any],
    loads: NDArray[Any],
    heavy: int,
    changed_at: IntArray,
    known: int,
) -> tuple[int, int, int]:
    """The swap of `heavy` with a lighter pool that leaves the smallest maximum, O(packs + K).

    (other pool, place in `heavy`, place in other), or -1 thrice where none lowers the maximum.
    Pairs of pools that have not changed since swap number `known` are known to have none.
    """
    best, other, mine, theirs = loads[heavy], -1, -1, -1
    lightest = int(np.argmin(loads))  # tried first: a good first swap rules out many pools
    for turn in range(-1, len(loads)):
        k = lightest if turn < 0 else turn
        gap = loads[heavy] - loads[k]
        # Half of both loads is the best that a swap could leave: skip pools where it is no gain.
        if turn == lightest or best - loads[k] <= loads[heavy] - best:
            continue
        if changed_at[heavy] <= known and changed_at[k] <= known:
            continue
        # The ideal swap gives away half the gap.  For each pack of `heavy` the two best partners
        # are those just above and just below weight - gap / 2; both rows descend, so one pointer
        # (`below`) moves through the other row once.
        below = 0
        for place in range(weights.shape[1]):
            weight = weights[heavy, place]
            while below < weights.shape[1]:
                surplus = weight - weights[k, below]
                if surplus > gap - surplus:
                    break
                below += 1
            for partner in range(max(0, below - 1), min(below + 1, weights.shape[1])):
                surplus = weight - weights[k, partner]
                heavier = loads[heavy] - surplus if partner < below else loads[k] + surplus
                if 0 < surplus < gap and heavier < best:
                    best, other, mine, theirs = heavier, k, place, partner
    return other, mine, theirs


@numba.njit(cache=True)
def _replace(row: IntArray, weights: NDArray[Any], place: int, pack: int, weight: Any) -> None:
    """Put `pack` in the row instead of the one at `place`, and keep the row in order."""
    last = len(row) - 1
    while place < last and (weights[place + 1], -row[place + 1]) > (weight, -pack):
        row[place], weights[place] = row[place + 1], weights[place + 1]
        place += 1
    while place > 0 and (weights[place - 1], -row[place - 1]) < (weight, -pack):
        row[place], weights[place] = row[place - 1], weights[place - 1]
        place -= 1
    row[place], weights[place] = pack, weight
