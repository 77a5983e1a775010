"""VRSP, variance-reduced sequence placement: which packs of a window share a sequence pool.

    window of GBS packs, by workload      pools of P packs           GA-major, pool-minor
    9  7  5  4  3  2  2  1           ->   {9,1}{7,2}{5,2}{4,3}  ->   GA 0: pool 0, pool 1
                                                                     GA 1: pool 2, pool 3

Pool k = i * (DP / P) + p runs at GA index i on data-parallel replicas p * P .. p * P + P - 1.
Packs stay whole and the window keeps its packs: only the order inside a window changes.  The
algorithm is the paper's ("Libra: Taming Attention Workload Skew in Long-Context LLM Training with
Bounded Sequence Pool"): longest first, with exact cardinality.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.data.lengths import check_count

IntArray = NDArray[np.int64]
Loads = NDArray[np.int64] | NDArray[np.float64]


def place_packs(workloads: ArrayLike, pool_size: int) -> IntArray:
    """Group a window's packs into pools of like load; int64 [pools, P] of indices into `workloads`.

    `workloads` [GBS], integers or floats >= 0 (`libra.data.lengths.pack_workload`).  Packs are taken by
    decreasing workload, ties by index, each into the least loaded pool that is not full, ties by
    pool index; a row lists its packs in that order.  Deterministic, O(GBS log GBS), exact for
    integers.

    Raises ValueError for an empty window, workloads that are negative, NaN or infinite, and P that
    doesn't divide GBS.
    """
    weights = check_workloads(workloads)
    pools = check_pool_size(len(weights), pool_size)
    ranked = np.argsort(-weights, kind="stable")
    members: list[list[int]] = [[] for _ in range(pools)]
    heap: list[tuple[Any, int]] = [(0, k) for k in range(pools)]  # sorted, so a heap already
    for pack, weight in zip(ranked.tolist(), weights[ranked].tolist(), strict=True):
        load, k = heap[0]
        members[k].append(pack)
        if len(members[k]) < pool_size:
            heapq.heapreplace(heap, (load + weight, k))
        else:
            heapq.heappop(heap)
    return np.array(members, dtype=np.int64)


def contiguous_pools(packs: int, pool_size: int) -> IntArray:
    """The baseline: packs grouped in sampler order, int64 [packs / P, P]."""
    pools = check_pool_size(packs, pool_size)
    return np.arange(packs, dtype=np.int64).reshape(pools, pool_size)


def pool_loads(workloads: ArrayLike, pools: IntArray) -> Loads:
    """Total workload of each pool, [pools]: exact int64 for integer workloads, else float64.

    `pools` [pools, P] holds indices into `workloads`, as from `place_packs`.
    """
    weights = check_workloads(workloads)
    if weights.dtype == np.int64 and int(weights.max()) * pools.shape[1] > np.iinfo(np.int64).max:
        raise ValueError(
            f"workloads of up to {weights.max()} in pools of {pools.shape[1]}: a pool's load may "
            "pass 2^63 - 1; pass them as floats"
        )
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


def check_workloads(workloads: ArrayLike) -> Loads:
    """Workloads as int64 or float64 [packs]; ValueError unless all are finite and >= 0."""
    array = np.asarray(workloads)
    if array.ndim != 1:
        raise ValueError(f"workloads has shape {array.shape}; it must hold one value per pack")
    if not array.size:
        raise ValueError("a window needs at least one pack; workloads is empty")
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"workloads has dtype {array.dtype} (first value {array[:1].tolist()[0]!r}); it must "
            "hold integers that fit an int64, or floats"
        )
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"workloads[{array.argmax()}] is {array.max()}; it does not fit an int64")
    weights: Loads
    if array.dtype.kind == "f":
        weights = array.astype(np.float64, copy=False)
    else:
        weights = array.astype(np.int64, copy=False)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise ValueError(
            f"workloads[{wrong[0]}] is {weights[wrong[0]]}; a workload must be finite and >= 0"
        )
    return weights
