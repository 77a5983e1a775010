"""The one entry to all readers: finds the format, reads in chunks, loses nothing silently."""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, Literal, cast, get_args

import numpy as np

from libra.corpus import arrow, megatron, text
from libra.corpus.request import CorpusError, IntArray, Request
from libra.data.lengths import check_count

Format = Literal["npy", "text", "jsonl", "parquet", "arrow", "megatron", "huggingface"]

STDIN: Final = "-"
STDIN_NAME: Final = "standard input"
MDS_INDEX: Final = "index.json"

_STREAMS: Final[dict[str, Callable[[BinaryIO, str, Request], Iterator[IntArray]]]] = {
    "npy": text.read_npy,
    "text": text.read_text,
    "jsonl": text.read_jsonl,
}
_FILES: Final[dict[str, Callable[[Path, Request], Iterator[IntArray]]]] = {
    "parquet": arrow.read_parquet,
    "arrow": arrow.read_arrow,
    "megatron": megatron.read_megatron,
    "huggingface": arrow.read_saved_dataset,
}
_SUFFIXES: Final[dict[str, Format]] = {
    ".npy": "npy",
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".idx": "megatron",
}
_MAGICS: Final[dict[bytes, Format]] = {
    text.NPY_MAGIC: "npy",
    arrow.PARQUET_MAGIC: "parquet",
    arrow.ARROW_MAGIC: "arrow",
    arrow.STREAM_MAGIC: "arrow",
    megatron.MAGIC: "megatron",
}
_GZIP: Final = b"\x1f\x8b"
_UNREAD: Final = {
    b"PK\x03\x04": "a zip archive (.npz?); save the lengths as one .npy",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; pipe it in: zstd -dc FILE | ... -",
    b"BZh": "compressed by bzip2; pipe it in: bzip2 -dc FILE | ... -",
    b"\xfd7zXZ": "compressed by xz; pipe it in: xz -dc FILE | ... -",
}
_SHARD_OF: Final = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")


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
    if format is not None and format not in get_args(Format):
        known = ", ".join(map(repr, get_args(Format)))
        raise ValueError(f"format is {format!r}; choose one of {known}")
    request = Request(column=column, tokenizer=tokenizer, chunk=chunk)
    return _whole(None if str(source) == STDIN else Path(source), format, request)


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


def _whole(path: Path | None, format: Format | None, request: Request) -> Iterator[IntArray]:
    """Chunks without empty ones, none too large; errors of the system as CorpusError."""
    name, samples = _name(path), 0
    try:
        described = (arrow.STATE, MDS_INDEX) if format in (None, "huggingface") else ()
        if path is not None and (path.is_dir() or path.name in described):
            chunks = _read_folder(path, format, request)
        else:
            chunks = _read_file(path, format, request)
        for lengths in chunks:
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


def _name(path: Path | None) -> str:
    return STDIN_NAME if path is None else str(path)


def _read_folder(path: Path, format: Format | None, request: Request) -> Iterator[IntArray]:
    """A dataset that its folder describes, or shards of one format."""
    folder = path if path.is_dir() else path.parent
    if format == "huggingface" or (format is None and (folder / arrow.STATE).exists()):
        return arrow.read_saved_dataset(folder, request)
    if format is None and (folder / MDS_INDEX).exists():
        raise CorpusError(
            folder,
            f"is an MDS dataset ({MDS_INDEX}), which Libra does not read: convert lengths to .npy "
            "with the package `streaming`, as the documentation shows",
        )
    if format is None and (folder / arrow.SPLITS).exists():
        raise arrow.refuse_splits(folder)
    shards = _shards(folder, format)
    return chain.from_iterable(_read_file(shard, format, request) for shard in shards)


def _read_file(path: Path | None, format: Format | None, request: Request) -> Iterator[IntArray]:
    """One file, or standard input where `path` is None."""
    found = format
    # Text and arrays are read from a stream; formats with a footer or an index need the file.
    if path is None or found not in _FILES:
        with _open_stream(path) as stream:
            found = found or _detect(stream.peek(), _name(path))
            if found in _STREAMS:
                yield from _STREAMS[found](cast(BinaryIO, stream), _name(path), request)
                return
    if path is None:
        raise CorpusError(STDIN_NAME, f"is {found}, which can be read from a file only")
    yield from _FILES[found](path, request)


class _Borrowed(io.BufferedReader):
    """A buffer over a stream that stays open when the buffer is closed or freed."""

    def close(self) -> None:
        pass


@contextmanager
def _open_stream(path: Path | None) -> Iterator[io.BufferedReader]:
    """Bytes of a file or of standard input, unzipped; `peek` shows the first of them."""
    source = cast(BinaryIO, sys.stdin.buffer) if path is None else path.open("rb")
    try:
        stream = _Borrowed(cast(io.RawIOBase, source), 1 << 20)
        # A pipe cannot be rewound: peeked bytes stay in the buffer.
        if stream.peek().startswith(_GZIP):
            unzipped = gzip.GzipFile(fileobj=cast(BinaryIO, stream))
            stream = _Borrowed(cast(io.RawIOBase, unzipped), 1 << 20)
        yield stream
    finally:
        if path is not None:
            source.close()


def _detect(head: bytes, name: str) -> Format:
    """The format of a file that starts with `head`.

    Content counts before the name: an array is read whatever its file is called, and a name that
    promises a binary format leads to that format's reader, which says what is wrong.
    """
    for magic, known in _MAGICS.items():
        if head.startswith(magic):
            return known
    for magic, problem in _UNREAD.items():
        if head.startswith(magic):
            raise CorpusError(name, f"is {problem}")
    by_name = _format_of(Path(name))
    if by_name is not None:
        return by_name
    return "jsonl" if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") else "text"


def _format_of(file: Path) -> Format | None:
    """The format that a file's name promises."""
    return _SUFFIXES.get(Path(file.name.removesuffix(".gz")).suffix)


def _shards(folder: Path, format: Format | None) -> list[Path]:
    """The files of a folder of shards of one format, by name.

    Raises CorpusError where there is none, where formats are mixed, where names such as
    00001-of-00004 say that some are missing, and for cache files of Hugging Face datasets, which
    are parts of no corpus.
    """
    kinds: dict[Format, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        kind = _format_of(file)
        if (
            kind is not None
            and kind == (format or kind)
            and file.is_file()
            and not file.name.startswith(".")
        ):
            kinds.setdefault(kind, []).append(file)
    if not kinds:
        suffixes = [suffix for suffix, kind in _SUFFIXES.items() if format in (None, kind)]
        problem = f"holds no file that ends in {', '.join(suffixes)}"
        if format is None:
            problem = (
                f"is a folder with neither {arrow.STATE} (Hugging Face) nor files that end in "
                f"{', '.join(suffixes)}; name a file of sample lengths"
            )
        raise CorpusError(folder, problem)
    # Reading only some of the files would lose samples without a word.
    if len(kinds) > 1:
        first = ", ".join(files[0].name for files in kinds.values())
        raise CorpusError(
            folder, f"is a folder that mixes formats ({first}); name one file, or give the format"
        )
    (files,) = kinds.values()
    _check_complete(folder, files)
    return files


def _check_complete(folder: Path, files: list[Path]) -> None:
    """CorpusError for shards whose names say that others are missing, and for cache files."""
    # For each series, as in train-00001-of-00004.parquet, the numbers that are there.
    series: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        if file.name.startswith("cache-"):
            raise CorpusError(
                folder,
                f"is a cache of Hugging Face datasets ({file.name}); give what save_to_disk wrote",
            )
        if found := _SHARD_OF.fullmatch(file.name):
            before, number, total, after = found.groups()
            series.setdefault((before, total, after), set()).add(int(number))
    for (before, total, after), there in series.items():
        if len(there) < int(total):
            raise CorpusError(
                folder, f"holds {len(there)} of the {int(total)} files {before}*-of-{total}{after}"
            )
