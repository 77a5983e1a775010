"""Beyond VRSP: pools of liker load by swaps, which of them share a GA index, and how good it gets.

    pools of VRSP        swap 6 and 5           grouped: heaviest first, like loads share an index
    {6,2,1}  9           {5,2,1}  8             GA 0:  {5,2,1} 8   {6,1,1} 8
    {5,1,1}  7      ->   {6,1,1}  8        ->   GA 1:  ...
    ...                  ...

The paper stops at the greedy (`libra.place_packs`) and its pool order; all of this file is ours.
Like the greedy it moves whole packs inside one window, and the same window gives the same pools on
every rank and machine.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.data.lengths import check_count
from libra.data.vrsp import check_pool_size, check_workloads, place_packs, pool_loads

IntArray = NDArray[np.int64]
PoolOrder = Literal["grouped", "uniform", "index"]

LOOKS_PER_POOL: Final = 16
"""Bound on the work of the refinement: how often a pool's swaps are searched, on average."""


def refine_pools(workloads: ArrayLike, pools: ArrayLike) -> IntArray:
    """Pools of liker load by pairwise swaps of packs; int64 [K, P], pool k of the result from k.

    `workloads` [GBS] and `pools` [K, P] as from `libra.place_packs`.  Again and again the heaviest
    pool swaps one pack with a lighter pool, the swap that leaves the least max of the two loads; a
    pool for which no swap lowers it steps back for the next heaviest.  Rows are returned by
    decreasing workload, ties by index, so pools that no swap improves come back as VRSP made them.

    Never worse in the heaviest load, and as each swap lowers the heavier of two pools, loads in
    decreasing order only fall.  Deterministic; exact for integers.  At most 16 K searches of
    O(GBS + K) each; about half of them in practice.

    Raises ValueError as `place_packs` does, and for pools that don't hold every pack once.
    """
    weights = check_workloads(workloads)
    before = _check_pools(len(weights), pools)
    loads = pool_loads(weights, before)
    ranked = np.take_along_axis(before, np.lexsort((before, -weights[before])), axis=1)
    if min(ranked.shape) == 1:
        return ranked
    from libra.data.refinement_kernels import swap_packs  # numba: loaded by those who need it

    after = ranked.copy()
    swap_packs(after, weights[after], loads.copy(), LOOKS_PER_POOL * len(after))
    worse = pool_loads(weights, after).max() > loads.max()  # floats only: sums that change round
    return ranked if worse else after


def order_pools(
    workloads: ArrayLike, pools: ArrayLike, pools_per_index: int, order: PoolOrder = "grouped"
) -> IntArray:
    """The pools [K, P] in the order of emission: row i * pools_per_index + p runs at GA index i.

    `pools_per_index` is DP / P.  Orders:

    - `grouped`: heaviest first, ties as given.  Like loads share an index, which makes the sum over
      indices of the slowest pool as small as any order can, for every `pools_per_index` at once:
      right where replicas meet at every index (sharded parameters, experts spread over replicas).
    - `uniform`: every index gets a like mix, for pipelines.  The heaviest pools go to different
      indices and the rest by VRSP, so that indices are alike in their sums; inside an index the
      heaviest pool goes to the replicas that have had the least.  Depends on `pools_per_index`.
    - `index`: as given, the paper's.

    Raises ValueError as `refine_pools` does, for an unknown order, and `pools_per_index` that
    doesn't divide K.
    """
    if order not in get_args(PoolOrder):
        choices = ", ".join(map(repr, get_args(PoolOrder)))
        raise ValueError(f"order is {order!r}; choose one of {choices}")
    weights = check_workloads(workloads)
    given = _check_pools(len(weights), pools)
    if len(given) % check_count("pools_per_index", pools_per_index):
        raise ValueError(
            f"{len(given)} pools cannot be spread over indices of pools_per_index="
            f"{pools_per_index} (dp_size / pool_size); it must divide them"
        )
    if order == "index":
        return given
    loads = pool_loads(weights, given)
    if order == "grouped":
        return given[np.argsort(-loads, kind="stable")]
    indices = place_packs(loads, pools_per_index)  # rows of pools, heaviest first
    had = np.zeros(pools_per_index, dtype=loads.dtype)
    for i, members in enumerate(indices):
        poorest = np.argsort(had, kind="stable")
        indices[i, poorest] = members.copy()
        had += loads[indices[i]]
    return given[indices.ravel()]


def bound(workloads: ArrayLike, pool_size: int) -> int | float:
    """A load that the heaviest pool of any placement has at least; an int for integer workloads.

    The j heaviest packs lie in some t pools, and the rest of these is no lighter than the t P - j
    lightest packs of all: on average, so in at least one of them,

        (sum of the j heaviest + sum of the t P - j lightest) / t,

    least over the possible t and then greatest over j.  j = 1 gives the heaviest pack with the P -
    1 lightest; j = GBS gives the mean.  Exact for integers, else up to rounding.  O(GBS K).

    Raises ValueError as `place_packs` does, and where the window's total may pass an int64.
    """
    weights = check_workloads(workloads)
    pools = check_pool_size(len(weights), pool_size)
    if weights.dtype == np.int64 and int(weights.max()) * len(weights) > np.iinfo(np.int64).max:
        raise ValueError(
            f"{len(weights)} workloads of up to {weights.max()}: their sum may pass 2^63 - 1; "
            "pass them as floats"
        )
    ascending = np.sort(weights)
    lightest = np.append(np.zeros(1, weights.dtype), np.cumsum(ascending))
    heaviest = np.append(np.zeros(1, weights.dtype), np.cumsum(ascending[::-1]))
    least = np.full(len(weights) + 1, weights.sum(), dtype=weights.dtype)
    for t in range(1, pools + 1):
        last = t * pool_size
        held = heaviest[t : last + 1] + lightest[last - t :: -1]  # for j = t .. t P
        mean = -(-held // t) if weights.dtype == np.int64 else held / t
        least[t : last + 1] = np.minimum(least[t : last + 1], mean)
    value: int | float = least[1:].max().item()
    return value


def distance_to_bound(workloads: ArrayLike, pools: ArrayLike) -> float:
    """How far the heaviest pool lies above the bound: load / bound - 1, 0 at best.

    Whatever is left after it is no placement's to gain: heavy packs that no pool can even out.
    """
    weights = check_workloads(workloads)
    checked = _check_pools(len(weights), pools)
    heaviest: int | float = pool_loads(weights, checked).max().item()
    return heaviest / least - 1.0 if (least := bound(weights, checked.shape[1])) else 0.0


def _check_pools(packs: int, pools: ArrayLike) -> IntArray:
    """A user's pools as int64 [K, P]; ValueError unless they hold each of the packs once."""
    array = np.asarray(pools)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"pools has shape {array.shape} and dtype {array.dtype}; it must hold integers "
            "[pools, packs of a pool], as from libra.place_packs"
        )
    if not np.array_equal(np.sort(array, axis=None), np.arange(packs)):
        raise ValueError(
            f"pools holds {array.size} indices; it must hold each of 0 .. {packs - 1}, "
            "the indices of workloads, exactly once"
        )
    return array.astype(np.int64, copy=False)
