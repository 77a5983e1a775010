"""Parquet files, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from libra.corpus.columns import column_measure
from libra.corpus.errors import CorpusError, IntArray
from libra.corpus.request import Request, require_pyarrow

MAGIC = b"PAR1"
BATCH_BYTES: Final = 1 << 26
"""Decoded bytes of a column held at a time: Parquet's lists must be decoded to be measured."""
READ_BYTES: Final = 1 << 20
"""Bytes read at a time; without it, a column of a row group is read at once."""


def read_parquet(path: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of a length column, or of the list sizes of a token column.

    Only that column is read, and only a part of it is in memory.  Raises CorpusError for a file
    that pyarrow cannot read, and one with fewer rows than its footer says.
    """
    arrow = require_pyarrow("pyarrow", path)
    parquet = require_pyarrow("pyarrow.parquet", path)
    rows = 0
    try:
        with parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as file:
            column, measure = column_measure(file.schema_arrow, request, path)
            at_a_time = min(request.chunk, _rows_of(BATCH_BYTES, file.metadata, column))
            for batch in file.iter_batches(at_a_time, columns=[column]):
                yield measure(batch.column(0), rows)
                rows += batch.num_rows
            expected = file.metadata.num_rows
    except (arrow.ArrowException, OSError) as error:
        raise CorpusError(path, f"cannot be read as Parquet: {error}") from error
    if rows != expected:
        raise CorpusError(path, f"holds {rows} rows; its footer says {expected}")


def _rows_of(size: int, metadata: Any, column: str) -> int:
    """Rows whose values in `column` take about `size` bytes when decoded; at least one."""
    bytes_per_row = 1
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        leaves = [group.column(j) for j in range(group.num_columns)]
        # Twice: dictionaries and packed bits decode to more than their stored size.
        stored = 2 * sum(
            leaf.total_uncompressed_size
            for leaf in leaves
            if leaf.path_in_schema.split(".")[0] == column
        )
        bytes_per_row = max(bytes_per_row, stored // max(1, group.num_rows))
    return max(1, size // bytes_per_row)
