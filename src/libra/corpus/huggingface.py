"""Hugging Face datasets as `save_to_disk` leaves them: Arrow streams that `state.json` lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.corpus.arrow import read_arrow
from libra.corpus.errors import CorpusError, IntArray
from libra.corpus.request import Request, require_pyarrow

STATE = "state.json"
SPLITS = "dataset_dict.json"
_INDICES_KEYS = ("_indices_data_files", "_indices_files")


def read_huggingface(folder: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of a length column, or of the list sizes of a token column.

    Newer versions of the library write the rows of a select or shuffle out; older ones saved the
    whole table and an `indices` table beside it, which is followed here (four bytes a row of the
    table are held then).  Raises CorpusError for a folder that lacks a file.
    """
    state = read_json(folder / STATE)
    files = _files(folder, state, "_data_files")
    if not files:
        raise CorpusError(folder / STATE, "lists no data file")
    indices = [file for key in _INDICES_KEYS for file in _files(folder, state, key)]
    lengths = (chunk for file in files for chunk in read_arrow(file, request))
    if not indices:
        yield from lengths
        return
    table = np.concatenate([np.empty(0, np.uint32), *(c.astype(np.uint32) for c in lengths)])
    for file in indices:
        yield from _selected(table, file, request)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CorpusError for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CorpusError(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CorpusError(path, f"is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorpusError(path, "is no JSON object")
    return content


def refuse_splits(folder: Path) -> CorpusError:
    """What to say of a dictionary of datasets."""
    splits = read_json(folder / SPLITS).get("splits") or ["train"]
    names = ", ".join(map(str, splits))
    return CorpusError(folder, f"holds the splits {names}; name one, as in {folder / splits[0]}")


def _files(folder: Path, state: dict[str, Any], key: str) -> list[Path]:
    try:
        return [folder / str(entry["filename"]) for entry in state.get(key) or []]
    except (TypeError, KeyError) as error:
        raise CorpusError(folder / STATE, f"has no list of file names in {key!r}") from error


def _selected(table: NDArray[np.uint32], file: Path, request: Request) -> Iterator[IntArray]:
    """Lengths of the rows that an indices table names, in its order."""
    first = 0
    for rows in _read_indices(file, request):
        wrong = np.flatnonzero((rows < 0) | (rows >= len(table)))
        if len(wrong):
            problem = f"names row {rows[wrong[0]]} of a table of {len(table)} rows"
            raise CorpusError(file, problem, first + int(wrong[0]))
        yield table[rows].astype(np.int64)
        first += len(rows)


def _read_indices(file: Path, request: Request) -> Iterator[IntArray]:
    arrow = require_pyarrow("pyarrow", file)
    ipc = require_pyarrow("pyarrow.ipc", file)
    try:
        with arrow.memory_map(str(file)) as data:
            for batch in ipc.open_stream(data):
                for first in range(0, batch.num_rows, request.chunk):
                    part = batch.column("indices").slice(first, request.chunk)
                    yield part.to_numpy(zero_copy_only=False).astype(np.int64)
    except (arrow.ArrowException, OSError, KeyError) as error:
        raise CorpusError(file, f"cannot be read as a table of indices: {error}") from error
