"""Parquet, Arrow and Feather files and folders of `datasets.save_to_disk`, through pyarrow.

Only the length column is read.  Parquet's lists must be decoded to be measured, so they are, a part
at a time; Arrow files are mapped into memory, where the sizes of lists come from their offsets and
values are never touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from libra.corpus.request import CorpusError, IntArray, Request, check_rows, choose_column
from libra.corpus.text import token_counter
from libra.extras import check_installed

Measure = Callable[[Any], Any]
"""From an Arrow array without nulls to numpy's array of its rows' lengths."""

PARQUET_MAGIC: Final = b"PAR1"
ARROW_MAGIC: Final = b"ARROW1"
STREAM_MAGIC: Final = b"\xff\xff\xff\xff"
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
    with _reading(path, "Parquet"):
        import pyarrow.parquet as pq

        with pq.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
            column, measure = _column(file.schema_arrow, request, path)
            rows = min(request.chunk, _rows_at_a_time(file.metadata, column))
            batches = file.iter_batches(rows, columns=[column])
            arrays = (batch.column(0) for batch in batches)
            yield from _lengths(arrays, column, measure, request, path)


def read_arrow(path: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of a length column, or of the list sizes of a token column.

    Raises CorpusError for a file that pyarrow cannot read, and for a stream without its end mark.
    """
    with _reading(path, "Arrow"):
        column, measure = _column(_open_arrow(path).schema, request, path)
        yield from _lengths(_arrow_arrays(path, column), column, measure, request, path)


def read_saved_dataset(folder: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of the lengths of a dataset that `save_to_disk` wrote: Arrow streams that its
    `state.json` lists.

    Newer versions of the library write the rows of a select or shuffle out; older ones saved the
    whole table and a table of `indices`, which is followed here (four bytes a row of the whole
    table are held then).  Raises CorpusError for a folder that lacks a file.
    """
    state = _read_json(folder / STATE)
    files = _listed_files(folder, state, "_data_files")
    if not files:
        raise CorpusError(folder / STATE, "lists no data file")
    keys = ("_indices_data_files", "_indices_files")
    indices = [file for key in keys for file in _listed_files(folder, state, key)]
    lengths = (chunk for file in files for chunk in read_arrow(file, request))
    if not indices:
        yield from lengths
        return
    # A selection may name rows in any order, so the lengths of all rows are held.
    table = np.concatenate([np.empty(0, np.uint32), *(c.astype(np.uint32) for c in lengths)])
    for file in indices:
        first = 0
        for rows in _saved_indices(file, request.chunk):
            wrong = np.flatnonzero((rows < 0) | (rows >= len(table)))
            if len(wrong):
                problem = f"names row {rows[wrong[0]]} of a table of {len(table)} rows"
                raise CorpusError(file, problem, first + int(wrong[0]))
            yield table[rows].astype(np.int64)
            first += len(rows)


def refuse_splits(folder: Path) -> CorpusError:
    """The error for a dictionary of datasets, of which a caller must name one."""
    splits = _read_json(folder / SPLITS).get("splits") or ["train"]
    names = ", ".join(map(str, splits))
    return CorpusError(folder, f"holds the splits {names}; name one, as in {folder / splits[0]}")


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """Errors of pyarrow as CorpusError; MissingPackageError without pyarrow."""
    check_installed("pyarrow", str(path))
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(path, f"cannot be read as {kind}: {error}") from error


def _column(schema: Any, request: Request, file: Path) -> tuple[str, Measure]:
    """The column to read, and its measure: integers as they are, sizes of lists, counted texts."""
    import pyarrow.compute as pc
    from pyarrow import types

    column = choose_column(request, schema.names, file)
    kind = schema.field(column).type
    lists = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    if types.is_integer(kind) or types.is_floating(kind):
        return column, _as_numpy
    # The size of a list is a difference of two offsets: its values stay unread.
    if any(getattr(types, f"is_{name}")(kind) for name in lists):
        return column, lambda array: _as_numpy(pc.list_value_length(array))
    if types.is_string(kind) or types.is_large_string(kind):
        count = token_counter(request, column, file)
        return column, lambda array: np.array(count(array.to_pylist()), dtype=np.int64)
    raise CorpusError(
        file, f"holds {kind} in {column!r}; it must hold integers, lists of tokens, or text"
    )


def _as_numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _lengths(
    arrays: Iterable[Any], column: str, measure: Measure, request: Request, file: Path
) -> Iterator[IntArray]:
    """Measured and checked lengths of a file's arrays, at most `chunk` rows at a time."""
    row = 0
    for whole in arrays:
        for first in range(0, len(whole), request.chunk):
            array = whole.slice(first, request.chunk)
            if array.null_count:
                null = row + int(np.argmax(_as_numpy(array.is_null())))
                raise CorpusError(file, f"{column!r} is null", null)
            yield check_rows(measure(array), file, range(row, row + len(array)))
            row += len(array)


def _rows_at_a_time(metadata: Any, column: str) -> int:
    """Rows whose values in `column` take about `_BATCH_BYTES` when decoded; at least one."""
    bytes_per_row = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        leaves = map(group.column, range(group.num_columns))
        sizes = (
            leaf.total_uncompressed_size
            for leaf in leaves
            if leaf.path_in_schema.split(".")[0] == column
        )
        # Twice: dictionaries and packed bits decode to more than their stored size.
        bytes_per_row = max(bytes_per_row, 2 * sum(sizes) // max(1, group.num_rows))
    return max(1, _BATCH_BYTES // bytes_per_row)


def _open_arrow(path: Path, column: str | None = None) -> Any:
    """A reader of a mapped Arrow file or stream, of one column where it is named."""
    import pyarrow as pa

    with path.open("rb") as file:
        is_file = file.read(len(ARROW_MAGIC)) == ARROW_MAGIC
        file.seek(max(0, file.seek(0, 2) - len(_END_OF_STREAM)))
        # A stream cut between two batches would be read without an error.
        if not is_file and file.read() != _END_OF_STREAM:
            raise CorpusError(
                path,
                "does not end in Arrow's end-of-stream mark: it is no Arrow stream, cut short, or "
                "still being written",
            )
    open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
    data = pa.memory_map(str(path))
    if column is None:
        return open_reader(data)
    # Without the option, a compressed file would have all of its columns decompressed.
    fields = [open_reader(data).schema.names.index(column)]
    data.seek(0)
    return open_reader(data, options=pa.ipc.IpcReadOptions(included_fields=fields))


def _arrow_arrays(path: Path, column: str) -> Iterator[Any]:
    """One column of each batch."""
    reader = _open_arrow(path, column)
    if hasattr(reader, "num_record_batches"):  # a file; streams are iterators
        reader = map(reader.get_batch, range(reader.num_record_batches))
    return (batch.column(0) for batch in reader)


def _saved_indices(file: Path, chunk: int) -> Iterator[IntArray]:
    """Rows of the whole table that a table of indices names, in its order."""
    with _reading(file, "a table of indices"):
        column = choose_column(Request(column="indices"), _open_arrow(file).schema.names, file)
        for array in _arrow_arrays(file, column):
            for first in range(0, len(array), chunk):
                yield _as_numpy(array.slice(first, chunk)).astype(np.int64)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorpusError(path, f"is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorpusError(path, "is no JSON object")
    return content


def _listed_files(folder: Path, state: dict[str, Any], key: str) -> list[Path]:
    try:
        return [folder / str(entry["filename"]) for entry in state.get(key) or []]
    except (TypeError, KeyError) as error:
        raise CorpusError(folder / STATE, f"has no list of file names in {key!r}") from error
