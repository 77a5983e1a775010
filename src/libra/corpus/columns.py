"""From an Arrow column to lengths: integers as they are, the sizes of lists, counted texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from libra.corpus.errors import CorpusError, IntArray, check_rows
from libra.corpus.request import Request, choose_column, needs_tokenizer, require_pyarrow
from libra.corpus.tokenizer import CountTokens, token_counter

Measure = Callable[[Any, int], IntArray]
"""From an Arrow array and the file's row of its first element to lengths, int64 [rows]."""


def column_measure(schema: Any, request: Request, file: Path | str) -> tuple[str, Measure]:
    """The column of an Arrow schema to read, and how to read it.

    The sizes of lists come from their offsets: values are not touched.  Raises CorpusError for a
    column of any other type, or a text column without a tokenizer; the measure raises it, with the
    row, for nulls and for what is no length.
    """
    types = require_pyarrow("pyarrow.types", file)
    compute = require_pyarrow("pyarrow.compute", file)
    column = choose_column(request, schema.names, file)
    kind = schema.field(column).type
    lists = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    values: Callable[[Any], Any]
    if types.is_integer(kind) or types.is_floating(kind):
        values = _as_numpy
    elif any(is_kind(kind) for is_kind in lists):
        values = partial(_list_sizes, compute.list_value_length)
    elif types.is_string(kind) or types.is_large_string(kind):
        if request.tokenizer is None:
            raise needs_tokenizer(file, column)
        values = partial(_token_counts, token_counter(request.tokenizer))
    else:
        raise CorpusError(
            file, f"holds {kind} in {column!r}; it must hold integers, lists of tokens, or text"
        )

    def measure(array: Any, first: int) -> IntArray:
        if array.null_count:
            row = first + int(np.argmax(_as_numpy(array.is_null())))
            raise CorpusError(file, f"{column!r} is null", row)
        return check_rows(values(array), file, first=first)

    return column, measure


def _list_sizes(list_value_length: Callable[[Any], Any], array: Any) -> Any:
    return _as_numpy(list_value_length(array))


def _token_counts(count: CountTokens, array: Any) -> Any:
    return np.array(count(array.to_pylist()), dtype=np.int64)


def _as_numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)
