"""Parquet, Arrow and Feather files and folders of `datasets.save_to_disk`, through pyarrow.

Only the length column is read.  Parquet's lists must be decoded to be measured, so they are, a part
at a time; Arrow files are mapped into memory, where the sizes of lists come from their offsets and
values are never touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from libra.corpus.request import CorpusError, Request
from libra.corpus.text import token_counter
from libra.data.lengths import IntArray, first_true
from libra.extras import check_installed

Measure = Callable[[Any], Any]
"""From an Arrow array without nulls to numpy's array of its rows' lengths."""

MAGICS: Final = (b"ARROW1", b"\xff\xff\xff\xff")
"""First bytes of a file and of a stream."""
STATE: Final = "state.json"
SPLITS: Final = "dataset_dict.json"
_END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_BATCH_BYTES: Final = 1 << 26
"""Decoded bytes of a Parquet column held at a time."""
_READ_BYTES: Final = 1 << 20
"""Bytes of Parquet read at a time; without it, a column of a row group is read at once."""


def read_parquet(path: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of a length column, or of the list sizes of a token column.

    Raises CorpusError for a file that pyarrow cannot read.
    """
    with _reading(request, "Parquet"):
        import pyarrow.parquet as pq

        with pq.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
            column, measure = _choose_measure(file.schema_arrow, request)
            rows = min(request.chunk, _rows_at_a_time(file.metadata))
            batches = file.iter_batches(rows, columns=[column])
            yield from _lengths((batch.column(0) for batch in batches), column, measure, request)


def read_arrow(path: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of a length column, or of the list sizes of a token column.

    Raises CorpusError for a file that pyarrow cannot read, and for a stream without its end mark.
    """
    with _reading(request, "Arrow"):
        column, measure = _choose_measure(_open_arrow(path).schema, request)
        yield from _lengths(_arrow_arrays(path, column), column, measure, request)


def read_saved_dataset(folder: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of the lengths of a dataset that `save_to_disk` wrote: Arrow streams that its
    `state.json` lists.

    Newer versions of the library write the rows of a select or shuffle out; older ones saved the
    whole table and a table of `indices`, which is followed here (four bytes a row of the whole
    table are held then).  Raises CorpusError for a folder that lacks a file.
    """
    files = _listed_files(folder, "_data_files")
    if not files:
        raise CorpusError(folder / STATE, "lists no data file")
    lengths = (chunk for file in files for chunk in read_arrow(file, replace(request, file=file)))
    indices = _listed_files(folder, "_indices_data_files", "_indices_files")
    if not indices:
        yield from lengths
        return
    # A selection may name rows in any order, so the lengths of all rows are held.
    table = np.concatenate([np.empty(0, np.uint32), *(c.astype(np.uint32) for c in lengths)])
    for file in indices:
        selection = replace(request, file=file, column="indices")
        with _reading(selection, "a table of indices"):
            column = selection.choose_column(_open_arrow(file).schema.names)
            for rows, array in _cut(_arrow_arrays(file, column), selection):
                chosen = _as_numpy(array)
                if (i := first_true((chosen < 0) | (chosen >= len(table)))) is not None:
                    problem = f"names row {chosen[i]} of a table of {len(table)} rows"
                    raise selection.error(problem, rows[i])
                yield table[chosen].astype(np.int64)


def refuse_splits(folder: Path) -> CorpusError:
    """The error for a dictionary of datasets, of which a caller must name one."""
    splits = _read_json(folder / SPLITS).get("splits") or ["train"]
    names = ", ".join(map(str, splits))
    return CorpusError(folder, f"holds the splits {names}; name one, as in {folder / splits[0]}")


@contextmanager
def _reading(request: Request, kind: str) -> Iterator[None]:
    """Errors of pyarrow as CorpusError; MissingPackageError without pyarrow."""
    check_installed("pyarrow", str(request.file))
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise request.error(f"cannot be read as {kind}: {error}") from error


def _choose_measure(schema: Any, request: Request) -> tuple[str, Measure]:
    """The column to read, and how its arrays become lengths: integers as they are, sizes of
    lists, counted texts.
    """
    import pyarrow.compute as pc
    from pyarrow import types

    column = request.choose_column(schema.names)
    kind = schema.field(column).type
    if types.is_integer(kind) or types.is_floating(kind):
        return column, _as_numpy
    # The size of a list is a difference of two offsets: its values stay unread.
    if hasattr(kind, "value_field"):  # a list of any kind
        return column, lambda array: _as_numpy(pc.list_value_length(array))
    if types.is_string(kind) or types.is_large_string(kind):
        count = token_counter(request, column)
        return column, lambda array: np.array(count(array.to_pylist()), dtype=np.int64)
    problem = f"holds {kind} in {column!r}; it must hold integers, lists of tokens, or text"
    raise request.error(problem)


def _as_numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _lengths(
    arrays: Iterator[Any], column: str, measure: Measure, request: Request
) -> Iterator[IntArray]:
    """Measured and checked lengths of a column's arrays, at most `chunk` rows at a time."""
    for rows, array in _cut(arrays, request):
        if (i := first_true(_as_numpy(array.is_null()))) is not None:
            raise request.error(f"{column!r} is null", rows[i])
        yield request.check_rows(measure(array), rows)


def _cut(arrays: Iterator[Any], request: Request) -> Iterator[tuple[range, Any]]:
    """Arrays of at most `chunk` rows, and the numbers of their rows in the file."""
    first = 0
    for array in arrays:
        for rows in request.chunks(len(array)):
            yield range(first, first + len(rows)), array.slice(rows.start, len(rows))
            first += len(rows)


def _rows_at_a_time(metadata: Any) -> int:
    """Rows that take at most about `_BATCH_BYTES` when all columns are decoded; at least one."""
    row_bytes = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        # Twice: dictionaries and packed bits decode to more than their stored size.
        row_bytes = max(row_bytes, 2 * group.total_byte_size // max(1, group.num_rows))
    return max(1, _BATCH_BYTES // row_bytes)


def _open_arrow(path: Path, column: str | None = None) -> Any:
    """A reader of a mapped Arrow file or stream, of one column where it is named."""
    import pyarrow as pa

    with path.open("rb") as file:
        is_file = file.read(len(MAGICS[0])) == MAGICS[0]
        file.seek(max(0, file.seek(0, 2) - len(_END_OF_STREAM)))
        # A stream cut between two batches would be read without an error.
        if not is_file and file.read() != _END_OF_STREAM:
            problem = "does not end in Arrow's end-of-stream mark: it is no Arrow stream, cut short"
            raise CorpusError(path, f"{problem}, or still being written")
    open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
    # Without the option, a compressed file would have all of its columns decompressed.
    fields = [] if column is None else [_open_arrow(path).schema.names.index(column)]
    options = pa.ipc.IpcReadOptions(included_fields=fields)
    return open_reader(pa.memory_map(str(path)), options=options)


def _arrow_arrays(path: Path, column: str) -> Iterator[Any]:
    """One column of each batch."""
    reader = _open_arrow(path, column)
    if hasattr(reader, "num_record_batches"):  # a file; streams are iterators
        reader = map(reader.get_batch, range(reader.num_record_batches))
    return (batch.column(0) for batch in reader)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorpusError(path, f"is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorpusError(path, "is no JSON object")
    return content


def _listed_files(folder: Path, *keys: str) -> list[Path]:
    """The files that `state.json` lists under these keys."""
    state = _read_json(folder / STATE)
    try:
        return [folder / str(each["filename"]) for key in keys for each in state.get(key) or []]
    except (TypeError, KeyError) as error:
        problem = f"has no list of file names in {' or '.join(map(repr, keys))}"
        raise CorpusError(folder / STATE, problem) from error
