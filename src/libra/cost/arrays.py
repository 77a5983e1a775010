"""One check of all arrays of numbers that are passed in: seconds, fractions, and grids."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Seconds = Floats


def check_array(
    name: str,
    values: ArrayLike,
    *,
    shape: tuple[int, ...] | None = None,
    shape_from: str = "",
    zero: bool = True,
) -> Floats:
    """`values` as float64; ValueError unless they are finite numbers >= 0, or > 0 without `zero`.

    `shape`, where it is given, must be theirs; the error says what it comes from, `shape_from`.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read as numbers: {error}") from error
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} holds {array.dtype}; it must hold numbers")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}, from {shape_from}")
    array = array.astype(np.float64)
    wrong = np.argwhere(~(np.isfinite(array) & (array >= 0) & (zero | (array > 0))))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        need = ">= 0" if zero else "> 0"
        raise ValueError(f"{name}{list(at)} is {array[at]}; it must be finite and {need}")
    return array
