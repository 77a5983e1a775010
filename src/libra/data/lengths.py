"""Costs that follow from lengths alone, and checks of what users pass in.

The workload w(S) = sum_j l_j^2 of a pack stands for its causal attention cost: sample j has
l_j (l_j + 1) / 2 query-key pairs.  The checks cover lengths, `cu_seqlens` and workloads; their
errors name the argument and the first wrong value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]
Loads = NDArray[np.int64] | NDArray[np.float64]

MAX_LENGTH: Final = 2**31
"""Longest sample or pack, in tokens; its square and its causal pairs fit an int64."""


def workloads(packs: Iterable[ArrayLike]) -> IntArray:
    """Sum of the squared sample lengths of every pack, int64 [packs]; 0 for a pack of padding only.

    Each pack is given as its sample lengths, integers in [1, 2^31].  Raises ValueError for anything
    else and where a sum passes an int64.
    """
    arrays = [check_lengths(lengths, name=f"pack {i}") for i, lengths in enumerate(packs)]
    offsets = np.cumsum([0, *map(len, arrays)])
    return segment_workloads(np.concatenate([*arrays, np.empty(0, dtype=np.int64)]), offsets)


def segment_workloads(lengths: IntArray, offsets: NDArray[np.integer[Any]]) -> IntArray:
    """Workloads of packs kept flat: pack i has lengths[offsets[i]:offsets[i+1]]; int64 [packs].

    `offsets` [packs + 1] runs from 0 to len(lengths).  Raises ValueError where a sum of squares may
    pass the largest int64.
    """
    sums = np.zeros(len(offsets) - 1, dtype=np.int64)
    filled = np.flatnonzero(np.diff(offsets) > 0)  # reduceat gives nonsense for empty segments
    if not len(filled):
        return sums
    starts = offsets[filled]
    longest = int(lengths.max())
    if longest * int(np.add.reduceat(lengths, starts).max()) > np.iinfo(np.int64).max:
        raise ValueError(
            f"samples of up to {longest} tokens: the sum of squared lengths of a pack may pass "
            "2^63 - 1; are these lengths in tokens?"
        )
    sums[filled] = np.add.reduceat(lengths * lengths, starts)
    return sums


def causal_pairs(start: ArrayLike, stop: ArrayLike) -> IntArray:
    """Query-key pairs of the queries start .. stop-1 of a sample: the sum of q + 1, int64.

    Broadcasts.  Positions are local to the sample; callers ensure 0 <= start <= stop <= 2^31.
    """
    first = np.asarray(start, dtype=np.int64)
    last = np.asarray(stop, dtype=np.int64)
    pairs: IntArray = (last - first) * (last + first + 1) // 2
    return pairs


def check_lengths(lengths: ArrayLike, *, name: str = "lengths") -> IntArray:
    """A user's sample lengths as int64 [samples].

    Accepts lists and whatever numpy can read (tensors, Arrow and pandas columns).  Raises
    ValueError, naming the first offending index, for values that are not integers (floats, NaN,
    bools, strings) or not in [1, 2^31].
    """
    array = _integers(lengths, name)
    if (i := first_true((array < 1) | (array > MAX_LENGTH))) is not None:
        raise ValueError(f"{name}[{i}] is {array[i]}; a sample has 1 to 2^31 tokens")
    return array


def check_cu_seqlens(cu_seqlens: ArrayLike, *, tokens: int | None = None) -> IntArray:
    """A user's sample bounds as strictly ascending int64 [samples + 1] from 0.

    Zero-length samples are dropped.  `tokens` is L, the rows of the pack: rows after the last bound
    are padding and cost nothing.  Raises ValueError for bounds that are not integers, don't start
    at 0, descend, or end after `tokens`.
    """
    bounds = _integers(cu_seqlens, "cu_seqlens")
    if not len(bounds):
        raise ValueError("cu_seqlens is empty; it must start at 0 and hold the end of every sample")
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts at {bounds[0]}; it must start at 0")
    steps = np.diff(bounds)
    if (i := first_true(steps < 0)) is not None:
        raise ValueError(
            f"cu_seqlens falls from {bounds[i]} to {bounds[i + 1]} at index {i + 1}: sample {i} "
            f"would have {steps[i]} tokens; bounds must ascend"
        )
    end = int(bounds[-1])
    if tokens is not None and end > tokens:
        raise ValueError(f"cu_seqlens ends at {end} but the pack has {tokens} tokens")
    if end > MAX_LENGTH:
        raise ValueError(f"cu_seqlens ends at {end}; a pack has at most 2^31 tokens")
    strict: IntArray = bounds[np.append(True, steps > 0)]
    return strict


def first_true(flags: NDArray[np.bool_]) -> int | None:
    """Index of the first flag that is set, such as that of the first wrong value; None for none."""
    return int(flags.argmax()) if flags.any() else None


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
    is_float = array.dtype.kind == "f"
    weights: Loads = array.astype(float, copy=False) if is_float else _as_int64(array, "workloads")
    if (i := first_true(~(np.isfinite(weights) & (weights >= 0)))) is not None:
        raise ValueError(f"workloads[{i}] is {weights[i]}; a workload must be finite and >= 0")
    return weights


def _integers(values: ArrayLike, name: str) -> IntArray:
    """`values` as a 1-D int64 array; ValueError, naming the first, for what is no integer."""
    if isinstance(values, list | tuple) and not set(map(type, values)) <= {int}:
        # numpy would read [1, True] as integers and [1, 2.0] as floats: look at the elements first
        for i, value in enumerate(values):
            if isinstance(value, bool) or not hasattr(type(value), "__index__"):
                raise ValueError(f"{name}[{i}] is {value!r}; it must be an integer")
    try:
        array = np.asarray(values)
    except Exception as error:  # tensors on a device, ragged lists: each library raises its own
        raise ValueError(f"{name} cannot be read as an array of integers: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must have one dimension")
    if not array.size:
        return np.empty(0, dtype=np.int64)  # an empty list reads as floats
    if array.dtype.kind not in "iu":
        i = first_non_integer(array)
        value = array[i : i + 1].tolist()[0]
        raise ValueError(f"{name}[{i}] is {value!r} (dtype {array.dtype}); it must be an integer")
    return _as_int64(array, name)


def _as_int64(array: NDArray[Any], name: str) -> IntArray:
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        i = int(array.argmax())
        raise ValueError(f"{name}[{i}] is {array[i]}; it does not fit an int64")
    return array.astype(np.int64, copy=False)


def first_non_integer(array: NDArray[Any]) -> int:
    """Index of the first value that is no whole number; 0 where only the dtype is wrong."""
    wrong = np.zeros(1, dtype=np.bool_)
    if array.dtype.kind == "f":
        wrong = array != np.floor(array)
    elif array.dtype.kind == "O":
        wrong = np.array([type(v) is not int or abs(v) >= 2**63 for v in array.tolist()])
    return int(wrong.argmax())
