"""Sample lengths from a file: what numpy saved, or a list that a person or a script wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libra.workload import check_lengths

_NPY = b"\x93NUMPY"
_SHOWN = 40


def read_lengths(path: Path) -> NDArray[np.int64]:
    """Sample lengths in tokens, int64 [samples].

    Reads a one-dimensional integer array from .npy, or integers as text, separated by commas or
    white space.  What a file holds counts, not its name, and nothing in it is run.  Raises
    ValueError for anything else, naming the file and the first bad place.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file of sample lengths")
    try:
        with path.open("rb") as file:
            is_array = file.read(len(_NPY)) == _NPY
        lengths = _read_array(path) if is_array else _read_text(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if not len(lengths):
        raise ValueError(f"{path} holds no sample length")
    return check_lengths(lengths, name=f"{path}: lengths")


def _read_array(path: Path) -> NDArray[np.int64]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:  # objects, or the file is cut short
        raise ValueError(f"{path} is no array of integers: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}; it must hold integers in one "
            "dimension, one length a sample"
        )
    lengths: NDArray[np.int64] = array
    return lengths


def _read_text(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is neither .npy nor text; give sample lengths as a .npy of integers, or as "
            "integers separated by commas or white space"
        ) from None
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise ValueError(_first_odd_word(path, text)) from None


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _first_odd_word(path: Path, text: str) -> str:
    """Say where a text stops being a list of integers."""
    for number, line in enumerate(text.splitlines(), start=1):
        for word in _words(line):
            try:
                int(word)
            except ValueError:
                shown = word if len(word) <= _SHOWN else word[:_SHOWN] + "..."
                return (
                    f"{path}, line {number}: {shown!r} is no integer; a text file holds sample "
                    "lengths separated by commas or white space"
                )
    raise AssertionError("some word of the text is no integer")
