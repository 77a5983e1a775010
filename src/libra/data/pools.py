"""A window's packs to sequence pools of nearly equal load: VRSP, refinement by swaps, pool order.

    window of GBS packs, by workload      pools of P packs           GA-major, pool-minor
    9  7  5  4  3  2  2  1           ->   {9,1}{7,2}{5,2}{4,3}  ->   GA 0: pool 0, pool 1
                                                                     GA 1: pool 2, pool 3

Pool k = i * (DP / P) + p runs at GA index i on data-parallel replicas p * P .. p * P + P - 1.
Packs stay whole and the window keeps its packs: only the order inside a window changes, and the
same window gives the same pools on every rank and machine.

VRSP (variance-reduced sequence placement) is the paper's algorithm ("Libra: Taming Attention
Workload Skew in Long-Context LLM Training with Bounded Sequence Pool"): longest first, with exact
cardinality.  The paper stops there; refinement, the other pool orders and the bound are ours:

    pools of VRSP        swap 6 and 5           grouped: similar loads share an index
    {6,2,1}  9           {5,2,1}  8             GA 0:  {5,2,1} 8   {6,1,1} 8
    {5,1,1}  7      ->   {6,1,1}  8        ->   GA 1:  ...
"""

from __future__ import annotations

import heapq
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from libra.config import check_choice, check_count
from libra.data.lengths import IntArray, Loads, check_workloads

PackPlacement = Literal["vrsp", "contiguous"]
PoolOrder = Literal["grouped", "uniform", "index"]

SEARCHES_PER_POOL: Final = 16
"""Bound on the work of the refinement: searches for a swap, on average over the pools."""


def make_pools(
    workloads: ArrayLike,
    pool_size: int,
    pools_per_index: int,
    *,
    placement: PackPlacement = "vrsp",
    refine: bool = True,
    order: PoolOrder = "grouped",
) -> IntArray:
    """Packs of every pool in the order of emission, int64 [K, P].

    `pools_per_index` (DP / P) consecutive rows share a gradient-accumulation index.  `contiguous`
    leaves packs and pools in their order; `refine` and `order` apply to `vrsp` only.  Raises
    ValueError as `place_packs`, `refine_pools` and `order_pools` do.
    """
    if placement == "contiguous":
        return contiguous_pools(len(np.asarray(workloads)), pool_size)
    pools = place_packs(workloads, pool_size)
    if refine:
        pools = refine_pools(workloads, pools)
    return order_pools(workloads, pools, pools_per_index, order)


def place_packs(workloads: ArrayLike, pool_size: int) -> IntArray:
    """Group a window's packs into pools of similar load; int64 [K, P] of indices into `workloads`.

    `workloads` [GBS], integers or floats >= 0 (`libra.data.lengths.workloads`).  Packs are
    assigned by decreasing workload, ties by index, each to the least loaded pool that is not full,
    ties by pool index; a row lists its packs in that order.  Deterministic, O(GBS log GBS), exact
    for integers.

    Raises ValueError for an empty window, workloads that are negative, NaN or infinite, and P that
    doesn't divide GBS.
    """
    weights = check_workloads(workloads)
    pools = check_pool_size(len(weights), pool_size)
    ranked = np.argsort(-weights, kind="stable")
    members: list[list[int]] = [[] for _ in range(pools)]
    open_pools: list[tuple[Any, int]] = [(0, k) for k in range(pools)]  # sorted: a heap already
    for pack, weight in zip(ranked.tolist(), weights[ranked].tolist(), strict=True):
        load, k = open_pools[0]
        members[k].append(pack)
        if len(members[k]) < pool_size:
            heapq.heapreplace(open_pools, (load + weight, k))
        else:
            heapq.heappop(open_pools)
    return np.array(members, dtype=np.int64)


def contiguous_pools(packs: int, pool_size: int) -> IntArray:
    """The baseline: packs grouped in sampler order, int64 [packs / P, P]."""
    pools = check_pool_size(packs, pool_size)
    return np.arange(packs, dtype=np.int64).reshape(pools, pool_size)


def refine_pools(workloads: ArrayLike, pools: ArrayLike) -> IntArray:
    """Swap packs between pools, so that their loads become more equal; int64 [K, P], where pool k
    of the result comes from pool k given.

    `workloads` [GBS] and `pools` [K, P] as from `libra.place_packs`.  Again and again the heaviest
    pool swaps one pack with a lighter pool: the swap that leaves the smallest maximum of the two
    loads.  A pool for which no swap lowers that maximum is passed over for the next heaviest.  Rows
    list their packs by decreasing workload, ties by index, so pools that no swap improves come back
    as VRSP made them.

    The heaviest load never rises, and as each swap lowers the heavier of two pools, the loads in
    decreasing order only fall.  Deterministic; exact for integers.  At most 16 K searches of
    O(GBS + K) each; about half of them in practice.

    Raises ValueError as `place_packs` does, and for pools that don't hold every pack once.
    """
    weights = check_workloads(workloads)
    before = _check_pools(len(weights), pools)
    loads = pool_loads(weights, before)
    ranked = np.take_along_axis(before, np.lexsort((before, -weights[before])), axis=1)
    if min(ranked.shape) == 1:
        return ranked  # one pool, or pools of one pack: no swap changes anything
    from libra.data.pools_kernels import swap_packs  # numba: half a second to import

    after = ranked.copy()
    swap_packs(after, weights[after], loads.copy(), SEARCHES_PER_POOL * len(after))
    # Only floats can end up worse: their sums are rounded in another order.
    return ranked if pool_loads(weights, after).max() > loads.max() else after


def order_pools(
    workloads: ArrayLike, pools: ArrayLike, pools_per_index: int, order: PoolOrder = "grouped"
) -> IntArray:
    """The pools [K, P] in the order of emission: row i * pools_per_index + p runs at GA index i.

    `pools_per_index` is DP / P.  Orders:

    - `grouped`: heaviest first, ties as given.  Similar loads share an index, so the sum over
      indices of the slowest pool is as small as any order can make it, for every `pools_per_index`
      at once: right where replicas synchronise at every index (sharded parameters, experts spread
      over replicas).
    - `uniform`: every index gets a similar mix, for pipelines.  The heaviest pools go to different
      indices and the rest by VRSP, so that indices have similar sums; inside an index the heaviest
      pool goes to the replicas with the least work so far.  Depends on `pools_per_index`.
    - `index`: the order given, which is VRSP's in the paper.

    Raises ValueError as `refine_pools` does, for an unknown order, and for `pools_per_index` that
    doesn't divide K.
    """
    check_choice("order", order, get_args(PoolOrder))
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
    # Step 1: VRSP over pools instead of packs; each row holds one index's pools, heaviest first.
    indices = place_packs(loads, pools_per_index)
    # Step 2: inside each index, the heaviest pool goes to the replicas with the least work so far.
    work = np.zeros(pools_per_index, dtype=loads.dtype)
    for i, members in enumerate(indices):
        least_first = np.argsort(work, kind="stable")
        indices[i, least_first] = members.copy()
        work += loads[indices[i]]
    return given[indices.ravel()]


def pool_loads(workloads: ArrayLike, pools: IntArray) -> Loads:
    """Total workload of each pool, [pools]: exact int64 for integer workloads, else float64.

    `pools` [pools, P] holds indices into `workloads`, as from `place_packs`.
    """
    weights = check_workloads(workloads)
    _check_sum(weights, pools.shape[1])
    loads: Loads = weights[pools].sum(axis=1)
    return loads


def imbalance(loads: ArrayLike) -> float:
    """max / mean - 1 of the loads: 0 where all are equal, all zero included."""
    array = np.asarray(loads)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"loads has shape {array.shape}; it must hold loads in one dimension")
    values = array.tolist()  # Python integers: equal loads give exactly 0 and nothing overflows
    total = sum(values)
    return max(values) * len(values) / total - 1.0 if total else 0.0


def bound(workloads: ArrayLike, pool_size: int) -> int | float:
    """A lower bound on the heaviest pool's load in any placement; an int for integer workloads.

    The j heaviest packs lie in some t pools, and the other packs of these pools weigh at least as
    much as the t P - j lightest packs of all.  So at least one of the t pools weighs

        (sum of the j heaviest + sum of the t P - j lightest) / t

    or more.  The bound is the minimum over the possible t, then the maximum over j.  j = 1 gives
    the heaviest pack with the P - 1 lightest; j = GBS gives the mean.  Exact for integers, else up
    to rounding.  O(GBS K).

    Raises ValueError as `place_packs` does, and where the window's total may pass an int64.
    """
    weights = check_workloads(workloads)
    pools = check_pool_size(len(weights), pool_size)
    _check_sum(weights, len(weights))
    # Step 1: sums of the j lightest and of the j heaviest packs, for j = 0 .. GBS.
    ascending = np.sort(weights)
    lightest = np.append(np.zeros(1, weights.dtype), np.cumsum(ascending))
    heaviest = np.append(np.zeros(1, weights.dtype), np.cumsum(ascending[::-1]))
    # Step 2: least[j], the minimum over the numbers t of pools that j packs may lie in.
    least = np.full(len(weights) + 1, weights.sum(), dtype=weights.dtype)
    for t in range(1, pools + 1):
        last = t * pool_size  # j = t .. t P packs may lie in t pools
        load = heaviest[t : last + 1] + lightest[last - t :: -1]
        mean = -(-load // t) if weights.dtype == np.int64 else load / t
        least[t : last + 1] = np.minimum(least[t : last + 1], mean)
    value: int | float = least[1:].max().item()
    return value


def distance_to_bound(workloads: ArrayLike, pools: ArrayLike) -> float:
    """How far the heaviest pool lies above the bound: load / bound - 1, 0 at best.

    No placement can gain more than this distance: the rest of the imbalance comes from packs so
    heavy that no pool can even them out.
    """
    weights = check_workloads(workloads)
    checked = _check_pools(len(weights), pools)
    heaviest: int | float = pool_loads(weights, checked).max().item()
    return heaviest / least - 1.0 if (least := bound(weights, checked.shape[1])) else 0.0


def check_pool_size(packs: int, pool_size: int) -> int:
    """Pools in a window of `packs`; ValueError unless P >= 1 divides it."""
    check_count("pool_size", pool_size)
    if packs < 1:
        raise ValueError("a window needs at least one pack; got none")
    if packs % pool_size:
        raise ValueError(
            f"a window of {packs} packs (the global batch) cannot be cut into pools of "
            f"pool_size={pool_size}; choose a pool_size that divides it"
        )
    return packs // pool_size


def _check_sum(weights: Loads, count: int) -> None:
    """ValueError where the sum of that many of the workloads may pass the largest int64."""
    if weights.dtype == np.int64 and int(weights.max()) * count > np.iinfo(np.int64).max:
        problem = f"{count} workloads of up to {weights.max()}: their sum may pass 2^63 - 1"
        raise ValueError(f"{problem}; pass them as floats")


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
