"""The request that a reader serves, the checks of its lengths, and the error where they fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import MAX_LENGTH, IntArray, first_non_integer, first_true

LENGTH_COLUMNS: Final = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len")
TOKEN_COLUMNS: Final = ("input_ids", "tokens")
TEXT_COLUMNS: Final = ("text", "content")
_SHOWN: Final = 40


class CorpusError(ValueError):
    """A corpus that cannot be read whole: names the file and, where there is one, the row.

    Rows of arrays and tables are counted from 0, lines of text from 1.
    """

    def __init__(
        self, file: Path | str, problem: str, row: int | None = None, unit: str = "row"
    ) -> None:
        super().__init__(file, problem, row, unit)  # all arguments, so that it can be pickled
        self.file, self.row = str(file), row
        self._text = f"{file} {problem}" if row is None else f"{file}, {unit} {row}: {problem}"

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A file, and the options of `read_lengths` that every reader gets."""

    file: Path | str
    """The file that is read; STDIN_NAME for standard input."""
    column: str | None = None
    """Column or key of the lengths, token lists or texts; None to look for a usual name."""
    tokenizer: object = None
    """Counts the tokens of a text, see `libra.corpus.text.token_counter`."""
    chunk: int = 1 << 20
    """Most rows read at a time."""

    def error(self, problem: str, row: int | None = None, unit: str = "row") -> CorpusError:
        """The error that names this file, and the row where there is one."""
        return CorpusError(self.file, problem, row, unit)

    def chunks(self, rows: int) -> Iterator[range]:
        """Numbers of the rows that are read at a time: of 5 rows, two at a time, 0 1, 2 3, 4."""
        return (range(rows)[i : i + self.chunk] for i in range(0, rows, self.chunk))

    def choose_column(self, names: Iterable[str], line: int | None = None) -> str:
        """The column to read: the requested one, else the first usual name that is there.

        Usual names are lengths, then token lists; texts come first where a tokenizer is given and
        aren't looked for otherwise.  Raises CorpusError where there is none; `line` says where
        the names were read.
        """
        file = self.file if line is None else f"{self.file}, line {line},"
        present = list(names)
        listed = ", ".join(map(repr, present[:20])) + (", ..." if len(present) > 20 else "")
        listed = listed or "no column"
        # A tokenizer says that texts are meant, even where there are lengths.
        texts = () if self.tokenizer is None else TEXT_COLUMNS
        usual = [*texts, *LENGTH_COLUMNS, *TOKEN_COLUMNS]
        for name in usual if self.column is None else [self.column]:
            if name in present:
                return name
        if self.column is not None:
            raise CorpusError(file, f"has no column {self.column!r}; it has {listed}")
        problem = f"has none of the usual columns {', '.join(usual)}; name one of {listed}"
        more = ", or a text column and a tokenizer" if self.tokenizer is None else ""
        raise CorpusError(file, f"{problem} as the column of lengths or token lists{more}")

    def check_rows(self, values: NDArray[Any], rows: Sequence[int], unit: str = "row") -> IntArray:
        """Lengths from the file as int64 [rows]; `rows[i]` is the file's number of values[i].

        Raises CorpusError for the first that is not an integer in [1, 2^31].  An object array
        holds Python integers of any size.
        """
        if not len(values):
            return np.empty(0, dtype=np.int64)
        if values.dtype.kind not in "iuO":
            wrong = first_non_integer(values)
            problem = f"{show(values[wrong].item())} ({values.dtype}) is no integer"
            raise self.error(problem, rows[wrong], unit)
        if (i := first_true((values < 1) | (values > MAX_LENGTH))) is not None:
            problem = f"{show(values.tolist()[i])} is no length; a sample has 1 to 2^31 tokens"
            raise self.error(problem, rows[i], unit)
        return values.astype(np.int64, copy=False)


def show(value: object) -> str:
    """A value for a message, shortened: a broken file may hold anything."""
    text = hex(value) if isinstance(value, int) and abs(value) > 2**64 else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
