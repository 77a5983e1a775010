"""The one error that a corpus raises, and the checks that every reader's lengths pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import MAX_LENGTH

IntArray = NDArray[np.int64]
_SHOWN = 40


class CorpusError(ValueError):
    """A corpus that cannot be read whole: names the file and, where there is one, the row.

    Rows of arrays and tables are counted from 0, lines of text from 1.
    """

    def __init__(
        self, file: Path | str, problem: str, row: int | None = None, unit: str = "row"
    ) -> None:
        super().__init__(file, problem, row, unit)  # all of them, so that it can be pickled
        self.file = str(file)
        self.row = row
        self._text = f"{file} {problem}" if row is None else f"{file}, {unit} {row}: {problem}"

    def __str__(self) -> str:
        return self._text


def check_rows(
    values: NDArray[Any], file: Path | str, *, first: int = 0, unit: str = "row"
) -> IntArray:
    """Lengths from a file as int64 [rows]; `first` is the file's row of values[0].

    Raises CorpusError for the first that is not an integer in [1, 2^31].
    """
    if values.dtype.kind not in "iu":
        if not len(values):
            return np.empty(0, dtype=np.int64)
        whole = values == np.floor(values) if values.dtype.kind == "f" else np.zeros(1, bool)
        i = int(np.argmin(whole))  # the first NaN or fraction; else only the type is wrong
        shown = show(values[i : i + 1].tolist()[0])
        raise CorpusError(file, f"{shown} ({values.dtype}) is no integer", first + i, unit)
    wrong = (values < 1) | (values > MAX_LENGTH)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise out_of_range(int(values[i]), file, first + i, unit)
    lengths: IntArray = values.astype(np.int64, copy=False)
    return lengths


def out_of_range(value: object, file: Path | str, row: int, unit: str = "row") -> CorpusError:
    return CorpusError(
        file, f"{show(value)} is no length; a sample has 1 to 2^31 tokens", row, unit
    )


def show(value: object) -> str:
    """A value for a message: short, whatever a broken file holds."""
    text = hex(value) if isinstance(value, int) and abs(value) > 2**64 else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
