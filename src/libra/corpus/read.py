"""The one entry to all readers: finds the format, reads in chunks, loses nothing silently."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from libra.config import check_choice, check_count
from libra.corpus import arrow, megatron, text
from libra.corpus.request import CorpusError, Request
from libra.data.lengths import IntArray

Format = Literal["npy", "text", "jsonl", "parquet", "arrow", "megatron", "huggingface"]

STDIN: Final = "-"
STDIN_NAME: Final = "standard input"
MDS_INDEX: Final = "index.json"


class _Reader(NamedTuple):
    """How a format is read, and by which names and first bytes it is recognised."""

    read: Callable[[Any, Request], Iterator[IntArray]]
    """From a stream for the formats of `_STREAMED`, else from a path, to chunks of lengths."""
    suffixes: tuple[str, ...] = ()
    magics: tuple[bytes, ...] = ()


_READERS: Final[dict[Format, _Reader]] = {
    "npy": _Reader(text.read_npy, (".npy",), (b"\x93NUMPY",)),
    "text": _Reader(text.read_text, (".txt",)),
    "jsonl": _Reader(text.read_jsonl, (".jsonl", ".ndjson")),
    "parquet": _Reader(arrow.read_parquet, (".parquet",), (b"PAR1",)),
    "arrow": _Reader(arrow.read_arrow, (".arrow", ".feather"), arrow.MAGICS),
    "megatron": _Reader(megatron.read_megatron, (".idx",), (megatron.MAGIC,)),
    "huggingface": _Reader(arrow.read_saved_dataset),
}
_STREAMED: Final = ("npy", "text", "jsonl")
"""Formats that are read in order, as from a pipe; others have a footer or an index."""
_GZIP: Final = b"\x1f\x8b"
_UNREAD: Final = {
    b"PK\x03\x04": "a zip archive (.npz?); save the lengths as one .npy",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; pipe it in: zstd -dc FILE | ... -",
    b"BZh": "compressed by bzip2; pipe it in: bzip2 -dc FILE | ... -",
    b"\xfd7zXZ": "compressed by xz; pipe it in: xz -dc FILE | ... -",
}
_SHARD_OF: Final = re.compile(r"(.*?)\d+-of-(\d+)(.*)")


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
    - `megatron`: the `.idx` next to a `.bin`; `column` "documents" or "sequences"
    - `huggingface`: the folder that a dataset's `save_to_disk` wrote

    or a folder of files of one format, read by name.  `format` overrides the format found.
    `column` defaults to a usual name (length, num_tokens, input_ids, tokens, ...); `tokenizer`
    counts the tokens of texts: a function, a tokenizer, a tokenizer.json or a name.  `.gz` is
    unzipped for npy, text and jsonl, which alone can come from standard input.

    Memory does not grow with the corpus.  Raises ValueError for arguments at once, and CorpusError,
    naming the file and the row, when reading reaches it: for values that are no lengths, files cut
    short or incomplete, and a corpus without a sample; MissingPackageError where pyarrow is needed.
    """
    check_count("chunk", chunk)
    if format is not None:
        check_choice("format", format, get_args(Format))
    path = None if str(source) == STDIN else Path(source)
    request = Request(file=path or STDIN_NAME, column=column, tokenizer=tokenizer, chunk=chunk)
    return _whole(path, format, request)


def load_lengths(
    source: str | Path,
    *,
    format: Format | None = None,
    column: str | None = None,
    tokenizer: object = None,
) -> IntArray:
    """Sample lengths of a whole corpus, int64 [samples]; arguments and errors of `read_lengths`."""
    chunks = read_lengths(source, format=format, column=column, tokenizer=tokenizer)
    return np.concatenate(list(chunks))


def _whole(path: Path | None, format: Format | None, request: Request) -> Iterator[IntArray]:
    """Chunks without empty ones, none too large; errors of the system as CorpusError."""
    samples = 0
    try:
        described = (arrow.STATE, MDS_INDEX) if format in (None, "huggingface") else ()
        if path is not None and (path.is_dir() or path.name in described):
            chunks = _read_folder(path if path.is_dir() else path.parent, format, request)
        else:
            chunks = _read_file(path, format, request)
        for lengths in chunks:
            samples += len(lengths)
            for rows in request.chunks(len(lengths)):
                yield lengths[rows.start : rows.stop]
    except (EOFError, zlib.error) as error:
        raise request.error(f"is cut short: {error}") from error
    except OSError as error:
        file = error.filename or request.file
        raise CorpusError(file, f"cannot be read: {error.strerror or error}") from error
    if not samples:
        raise request.error("holds no sample length")


def _read_folder(folder: Path, format: Format | None, request: Request) -> Iterator[IntArray]:
    """A dataset that its folder describes, or shards of one format."""
    if format == "huggingface" or (format is None and (folder / arrow.STATE).exists()):
        return arrow.read_saved_dataset(folder, request)
    if format is None and (folder / MDS_INDEX).exists():
        problem = f"is an MDS dataset ({MDS_INDEX}), which Libra does not read: convert lengths to"
        advice = ".npy with the package `streaming`, as the documentation shows"
        raise CorpusError(folder, f"{problem} {advice}")
    if format is None and (folder / arrow.SPLITS).exists():
        raise arrow.refuse_splits(folder)
    shards = _shards(folder, format)
    return chain.from_iterable(
        _read_file(shard, format, replace(request, file=shard)) for shard in shards
    )


def _read_file(path: Path | None, format: Format | None, request: Request) -> Iterator[IntArray]:
    """One file, or standard input where `path` is None."""
    if path is None or format is None or format in _STREAMED:
        with _open_stream(path) as stream:
            format = format or _detect(stream.peek(1), request)
            if format in _STREAMED:
                yield from _READERS[format].read(stream, request)
                return
    if path is None:
        raise request.error(f"is {format}, which can be read from a file only")
    yield from _READERS[format].read(path, request)


@contextmanager
def _open_stream(path: Path | None) -> Iterator[Any]:
    """Bytes of a file or of standard input, unzipped; `peek` shows the first of them."""
    stream: Any = sys.stdin.buffer if path is None else path.open("rb", buffering=1 << 20)
    try:
        # A pipe cannot be rewound: peeked bytes stay in the buffer.
        zipped = stream.peek(len(_GZIP)).startswith(_GZIP)
        yield gzip.GzipFile(fileobj=stream) if zipped else stream
    finally:
        if path is not None:
            stream.close()


def _detect(head: bytes, request: Request) -> Format:
    """The format of a file that starts with `head`.

    Content counts before the name: an array is read whatever its file is called, and a name that
    promises a binary format leads to that format's reader, which says what is wrong.
    """
    for format, reader in _READERS.items():
        if head.startswith(reader.magics):
            return format
    for magic, problem in _UNREAD.items():
        if head.startswith(magic):
            raise request.error(f"is {problem}")
    is_object = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
    return _format_of(Path(request.file)) or ("jsonl" if is_object else "text")


def _format_of(file: Path) -> Format | None:
    """The format that a file's name promises."""
    suffix = Path(file.name.removesuffix(".gz")).suffix
    return next((name for name, reader in _READERS.items() if suffix in reader.suffixes), None)


def _shards(folder: Path, format: Format | None) -> list[Path]:
    """The files of a folder of shards of one format, by name.

    Raises CorpusError where there is none, where formats are mixed, where names such as
    00001-of-00004 say that some are missing, and for cache files of Hugging Face datasets, which
    are parts of no corpus.
    """
    kinds: dict[Format, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        kind = _format_of(file)
        if kind and format in (None, kind) and file.is_file() and not file.name.startswith("."):
            kinds.setdefault(kind, []).append(file)
    if not kinds:
        read = [reader for name, reader in _READERS.items() if format in (None, name)]
        endings = ", ".join(suffix for reader in read for suffix in reader.suffixes)
        if format is not None:
            raise CorpusError(folder, f"holds no file that ends in {endings}")
        problem = f"is a folder with neither {arrow.STATE} (Hugging Face) nor files that end in"
        raise CorpusError(folder, f"{problem} {endings}; name a file of sample lengths")
    # Reading only some of the files would lose samples without a word.
    if len(kinds) > 1:
        first = ", ".join(files[0].name for files in kinds.values())
        problem = f"is a folder that mixes formats ({first}); name one file, or give the format"
        raise CorpusError(folder, problem)
    (files,) = kinds.values()
    for file in files:
        if file.name.startswith("cache-"):
            problem = f"is a cache of Hugging Face datasets ({file.name}); give what"
            raise CorpusError(folder, f"{problem} save_to_disk wrote")
    # For each series, as of train-00001-of-00004.parquet, the number of its files that are there.
    series = Counter(found.groups() for file in files if (found := _SHARD_OF.fullmatch(file.name)))
    for (before, total, after), there in series.items():
        if there < int(total):
            problem = f"holds {there} of the {int(total)} files {before}*-of-{total}{after}"
            raise CorpusError(folder, problem)
    return files
