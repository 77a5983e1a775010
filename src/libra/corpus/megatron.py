"""Megatron's `.idx`: the index beside a `.bin` of tokens, of which only the index is read.

    MMIDIDX\\0\\0 | version u64 | dtype u8 | sequences u64 | documents u64        34 bytes
    lengths i32 [sequences] | pointers i64 [sequences] | documents i64 [documents]
    modes i8 [sequences], in some files

Little-endian.  `documents` holds the first sequence of each document, then their number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from libra.corpus.errors import CorpusError, IntArray, check_rows
from libra.corpus.request import Request

MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
_ITEM_BYTES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
COLUMNS: Final = ("documents", "sequences")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """What the header says."""

    path: Path
    sequences: int
    documents: int
    """Entries of the document list: documents + 1."""
    item_bytes: int

    @property
    def pointers_at(self) -> int:
        return _HEADER.size + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        return self.pointers_at + 8 * self.sequences

    @property
    def end(self) -> int:
        return self.documents_at + 8 * self.documents


def read_megatron(path: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of the tokens of each document, or, with column "sequences", of each sequence.

    The two differ only where documents were split into sentences.  Where the `.bin` lies beside
    the index, every sequence must lie in it.  Raises CorpusError for a header of another kind, an
    index or `.bin` cut short, and sequences that no document has.
    """
    column = request.column or "documents"
    if column not in COLUMNS:
        raise CorpusError(path, f"has no column {column!r}; choose one of {', '.join(COLUMNS)}")
    with path.open("rb") as file:
        index = _read_header(path, file)
        _check_bin(index, file, request.chunk)
        if column == "documents":
            yield from _document_lengths(index, file, request.chunk)
            return
        for first in range(0, index.sequences, request.chunk):
            stop = min(first + request.chunk, index.sequences)
            yield check_rows(_lengths(index, file, first, stop), path, first=first, unit="sequence")


def _read_header(path: Path, file: BinaryIO) -> _Index:
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[: len(MAGIC)] != MAGIC:
        old = " (TNTIDX is the older, unmapped kind)" if head.startswith(b"TNTIDX") else ""
        raise CorpusError(path, f"is no Megatron index: it starts with {head[:9]!r}{old}")
    _, version, dtype, sequences, documents = _HEADER.unpack(head)
    if version != 1:
        raise CorpusError(path, f"is a Megatron index of version {version}; only 1 is known")
    if dtype not in _ITEM_BYTES:
        raise CorpusError(path, f"names the unknown token type {dtype}; known are 1 to 8")
    index = _Index(
        path=path, sequences=sequences, documents=documents, item_bytes=_ITEM_BYTES[dtype]
    )
    size = path.stat().st_size
    if size not in (index.end, index.end + sequences):  # with modes or without
        raise CorpusError(
            path,
            f"has {size} bytes; its header says {sequences} sequences and {documents} document "
            f"bounds, which take {index.end}: it is cut short or damaged",
        )
    return index


def _read(file: BinaryIO, at: int, dtype: str, count: int) -> NDArray[Any]:
    file.seek(at)
    array: NDArray[Any] = np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype)
    return array


def _lengths(index: _Index, file: BinaryIO, first: int, stop: int) -> NDArray[np.int32]:
    return _read(file, _HEADER.size + 4 * first, "<i4", stop - first)


def _check_bin(index: _Index, file: BinaryIO, chunk: int) -> None:
    """CorpusError where the `.bin` is there and does not hold all of a sequence."""
    data = index.path.with_suffix(".bin")
    if not data.is_file():
        return
    size = data.stat().st_size
    for first in range(0, index.sequences, chunk):
        stop = min(first + chunk, index.sequences)
        starts = _read(file, index.pointers_at + 8 * first, "<i8", stop - first)
        ends = starts + _lengths(index, file, first, stop).astype(np.int64) * index.item_bytes
        wrong = np.flatnonzero((starts < 0) | (ends > size))
        if len(wrong):
            i = int(wrong[0])
            problem = f"lies at bytes {starts[i]} to {ends[i]} of {data.name}, which has {size}"
            raise CorpusError(index.path, problem, first + i, "sequence")


def _document_lengths(index: _Index, file: BinaryIO, chunk: int) -> Iterator[IntArray]:
    bounds = np.zeros(1, np.int64)
    if index.documents:
        bounds = _read(file, index.documents_at, "<i8", 1)
    last = int(bounds[0])
    if last:
        raise CorpusError(index.path, f"starts its documents at sequence {last}, not 0")
    for first in range(0, index.documents - 1, chunk):
        count = min(chunk, index.documents - 1 - first)
        bounds = _read(file, index.documents_at + 8 * first, "<i8", count + 1)
        wrong = np.flatnonzero((np.diff(bounds) < 1) | (bounds[1:] > index.sequences))
        if len(wrong):
            i = int(wrong[0])
            problem = f"has the sequences {bounds[i]} to {bounds[i + 1]} of {index.sequences}"
            raise CorpusError(index.path, f"{problem}: none, or not there", first + i, "document")
        last = int(bounds[-1])
        lengths = _lengths(index, file, int(bounds[0]), last).astype(np.int64)
        wrong = np.flatnonzero(lengths < 0)
        if len(wrong):
            i = int(wrong[0])
            raise CorpusError(
                index.path, f"{lengths[i]} is no length", int(bounds[0]) + i, "sequence"
            )
        totals = np.add.reduceat(lengths, bounds[:-1] - bounds[0])
        yield check_rows(totals, index.path, first=first, unit="document")
    if last != index.sequences:
        raise CorpusError(
            index.path,
            f"has {index.sequences} sequences, of which its documents hold only {last}; it may be "
            "damaged (column='sequences' reads the sequences themselves)",
        )
