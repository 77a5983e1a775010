"""Pairwise swaps of packs between pools, compiled.  Imported only by the refinement."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@numba.njit(cache=True)
def swap_packs(pools: IntArray, weights: NDArray[Any], loads: NDArray[Any], looks: int) -> int:
    """Swap packs until no swap helps or `looks` pools have been looked at; how many swaps.

    `pools` [K, P], each row by decreasing weight, ties by index; `weights` [K, P] of those packs;
    `loads` [K].  All are changed in place, the order inside rows is kept.

    The heaviest pool that is not stuck makes the swap that leaves the lighter pair: the one with
    the least max of both loads, the first found of equals.  A pool without a swap is stuck.  When
    all are, those whose surroundings have changed since are looked at again.
    """
    stuck = np.zeros(len(loads), dtype=np.bool_)
    looked_at = np.full(len(loads), -1)  # swaps that had been made when a pool got stuck
    changed_at = np.zeros(len(loads), dtype=np.int64)
    swaps, swaps_before = 0, -1
    for _ in range(looks):
        heavy = _heaviest(loads, stuck)
        if heavy < 0:
            if swaps == swaps_before:
                break
            swaps_before = swaps
            stuck[:] = False
            heavy = _heaviest(loads, stuck)
        other, mine, theirs = _best_swap(weights, loads, heavy, changed_at, looked_at[heavy])
        if other < 0:
            stuck[heavy] = True
            looked_at[heavy] = swaps
            continue
        swaps += 1
        changed_at[heavy] = swaps
        changed_at[other] = swaps
        going, weight = pools[heavy, mine], weights[heavy, mine]
        coming, its_weight = pools[other, theirs], weights[other, theirs]
        loads[heavy] -= weight - its_weight
        loads[other] += weight - its_weight
        _replace(pools[heavy], weights[heavy], mine, coming, its_weight)
        _replace(pools[other], weights[other], theirs, going, weight)
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
    """The swap of `heavy` with a lighter pool that leaves the least max of both, O(packs + K).

    (other pool, place in `heavy`, place in other), or -1 thrice where none lowers the max.  Pairs
    that have not changed since swap number `known` are known to have none.
    """
    best, other, mine, theirs = loads[heavy], -1, -1, -1
    lightest = int(np.argmin(loads))  # first: the better the first swap, the more pools are skipped
    for turn in range(-1, len(loads)):
        k = lightest if turn < 0 else turn
        gap = loads[heavy] - loads[k]
        if turn == lightest or best - loads[k] <= loads[heavy] - best:
            continue  # not lighter, or even two equal loads would be no better
        if changed_at[heavy] <= known and changed_at[k] <= known:
            continue
        # Of the other pool's packs, the two around weight - gap / 2 come nearest to half the gap.
        below = 0
        for place in range(weights.shape[1]):
            weight = weights[heavy, place]
            while below < weights.shape[1]:
                surplus = weight - weights[k, below]
                if surplus > gap - surplus:
                    break
                below += 1
            if below > 0:
                surplus = weight - weights[k, below - 1]
                if surplus > 0 and loads[heavy] - surplus < best:
                    best = loads[heavy] - surplus
                    other, mine, theirs = k, place, below - 1
            if below < weights.shape[1]:
                surplus = weight - weights[k, below]
                if surplus < gap and loads[k] + surplus < best:
                    best = loads[k] + surplus
                    other, mine, theirs = k, place, below
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
