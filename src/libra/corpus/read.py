"""One door to all readers: find the format, read in chunks, lose nothing silently."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, get_args

import numpy as np

from libra.corpus import huggingface, mds
from libra.corpus.arrow import read_arrow
from libra.corpus.errors import CorpusError, IntArray
from libra.corpus.formats import (
    SUFFIXES,
    Format,
    check_shards,
    detect_folder,
    detect_stream,
    list_shards,
)
from libra.corpus.huggingface import read_huggingface
from libra.corpus.jsonl import read_jsonl
from libra.corpus.mds import read_mds
from libra.corpus.megatron import read_megatron
from libra.corpus.npy import read_npy
from libra.corpus.parquet import read_parquet
from libra.corpus.request import Request
from libra.corpus.stream import open_stream
from libra.corpus.text import read_text
from libra.data.lengths import check_count

STDIN: Final = "-"
STDIN_NAME: Final = "standard input"

StreamReader = Callable[[BinaryIO, str, Request], Iterator[IntArray]]
PathReader = Callable[[Path, Request], Iterator[IntArray]]

STREAMS: Final[dict[str, StreamReader]] = {"npy": read_npy, "text": read_text, "jsonl": read_jsonl}
FILES: Final[dict[str, PathReader]] = {
    "parquet": read_parquet,
    "arrow": read_arrow,
    "megatron": read_megatron,
}
FOLDERS: Final[dict[str, PathReader]] = {"huggingface": read_huggingface, "mds": read_mds}


def read_lengths(
    source: str | Path,
    *,
    format: Format | None = None,
    column: str | None = None,
    tokenizer: object = None,
    chunk: int = 1 << 20,
) -> Iterator[IntArray]:
    """Sample lengths of a corpus in its order, in chunks: int64 [1 .. chunk], each in [1, 2^31].

    `source` is a file, a folder, or "-" for standard input:

    - `npy`: integers that numpy saved, in one dimension
    - `text`: integers, one a line or with commas or white space between; `#` starts a comment
    - `jsonl`: a length, a list of tokens or a text a line
    - `parquet`, `arrow`: an integer column, the sizes of a list column, or a text column
    - `megatron`: the `.idx` beside a `.bin`; `column` "documents" or "sequences"
    - `huggingface`: the folder that a dataset's `save_to_disk` wrote
    - `mds`: the folder of a MosaicML dataset

    or a folder of files of one format, read by name.  `format` overrides what is found.  `column`
    defaults to a usual name (length, num_tokens, input_ids, tokens, ...); `tokenizer` counts the
    tokens of texts: a function, a tokenizer, a tokenizer.json or a name.  `.gz` is unzipped for
    npy, text and jsonl, which alone can come from standard input.

    Memory does not grow with the corpus.  Raises ValueError for arguments at once, and CorpusError,
    naming the file and the row, when reading comes to it: for what is no length, files cut short
    or incomplete, and a corpus without a sample.
    """
    check_count("chunk", chunk)
    if format is not None and format not in get_args(Format):
        known = ", ".join(map(repr, get_args(Format)))
        raise ValueError(f"format is {format!r}; choose one of {known}")
    request = Request(column=column, tokenizer=tokenizer, chunk=chunk)
    name = STDIN_NAME if str(source) == STDIN else str(source)
    return _whole(source, format, request, name)


def load_lengths(
    source: str | Path,
    *,
    format: Format | None = None,
    column: str | None = None,
    tokenizer: object = None,
) -> IntArray:
    """All of `read_lengths` as one array, int64 [samples]."""
    return np.concatenate(
        list(read_lengths(source, format=format, column=column, tokenizer=tokenizer))
    )


def _whole(
    source: str | Path, format: Format | None, request: Request, name: str
) -> Iterator[IntArray]:
    """Chunks without empty ones, none too large; CorpusError for whatever the system refuses."""
    samples = 0
    try:
        for lengths in _chunks(source, format, request):
            samples += len(lengths)
            for first in range(0, len(lengths), request.chunk):
                yield lengths[first : first + request.chunk]
    except (EOFError, zlib.error) as error:
        raise CorpusError(name, f"is cut short: {error}") from error
    except OSError as error:
        file = error.filename or name
        raise CorpusError(file, f"cannot be read: {error.strerror or error}") from error
    if not samples:
        raise CorpusError(name, "holds no sample length")


def _chunks(source: str | Path, format: Format | None, request: Request) -> Iterator[IntArray]:
    if str(source) == STDIN:
        return _from_stream(None, format, request)
    path = Path(source)
    if path.name in (huggingface.STATE, mds.INDEX) and format in (None, *FOLDERS):
        path = path.parent
    found = format or (detect_folder(path) if path.is_dir() else None)
    if found in FOLDERS:
        return FOLDERS[found](path, request)
    if not path.is_dir():
        return _from_stream(path, format, request)
    return chain.from_iterable(
        _from_stream(shard, format, request) for shard in _shards(path, format)
    )


def _shards(folder: Path, format: Format | None) -> list[Path]:
    if format is None:
        return list_shards(folder)
    suffixes = {suffix for suffix, kind in SUFFIXES.items() if kind == format}
    files = [f for f in sorted(folder.iterdir()) if suffixes & set(f.suffixes[-2:])]
    if not files:
        raise CorpusError(folder, f"holds no file that ends in {' or '.join(sorted(suffixes))}")
    check_shards(folder, files)
    return files


def _from_stream(path: Path | None, format: Format | None, request: Request) -> Iterator[IntArray]:
    name = STDIN_NAME if path is None else str(path)
    if path is not None and format in FILES:
        yield from FILES[format](path, request)
        return
    with open_stream(path) as (head, stream):
        found = format or detect_stream(head, name)
        if found in STREAMS:
            yield from STREAMS[found](stream, name, request)
            return
    if path is None:
        raise CorpusError(name, f"is {found}, which can be read from a file only")
    yield from FILES[found](path, request)
