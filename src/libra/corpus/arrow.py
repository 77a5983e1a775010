"""Arrow IPC files and streams, through pyarrow: mapped, so that list values are never read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libra.corpus.columns import Measure, column_measure
from libra.corpus.errors import CorpusError, IntArray
from libra.corpus.request import Request, require_pyarrow

FILE_MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_arrow(path: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of a length column, or of the list sizes of a token column.

    Raises CorpusError for a file that pyarrow cannot read.  A stream may be cut between two batches
    and still be read without an error, so it must end in its end mark, as all writers leave it.
    """
    arrow = require_pyarrow("pyarrow", path)
    ipc = require_pyarrow("pyarrow.ipc", path)
    with path.open("rb") as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        if not is_file:
            file.seek(max(0, file.seek(0, 2) - len(_END_OF_STREAM)))
            if file.read() != _END_OF_STREAM:
                raise CorpusError(
                    path,
                    "does not end in Arrow's end-of-stream mark: it is no Arrow stream, cut short, "
                    "or still being written",
                )
    open_reader = ipc.open_file if is_file else ipc.open_stream
    try:
        with arrow.memory_map(str(path)) as data:
            schema = open_reader(data).schema
            column, measure = column_measure(schema, request, path)
            options = ipc.IpcReadOptions(included_fields=[schema.names.index(column)])
            data.seek(0)
            yield from _measured(open_reader(data, options=options), is_file, measure, request)
    except (arrow.ArrowException, OSError) as error:
        raise CorpusError(path, f"cannot be read as Arrow: {error}") from error


def _measured(reader: Any, is_file: bool, measure: Measure, request: Request) -> Iterator[IntArray]:
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    rows = 0
    for batch in batches:
        values = batch.column(0)
        for first in range(0, len(values), request.chunk):
            yield measure(values.slice(first, request.chunk), rows + first)
        rows += len(values)
