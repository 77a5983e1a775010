"""Megatron's `.idx`: the index next to a `.bin` of tokens, of which only the index is read.

    MMIDIDX\\0\\0 | version u64 | dtype u8 | sequences u64 | documents u64        34 bytes
    lengths i32 [sequences] | pointers i64 [sequences] | documents i64 [documents]
    modes i8 [sequences], in some files

Little-endian.  `documents` holds the first sequence of each document, then their number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.corpus.request import Request
from libra.data.lengths import IntArray, first_true

MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
_ITEM_BYTES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
COLUMNS: Final = ("documents", "sequences")


class _Index(NamedTuple):
    """The arrays of an index, mapped."""

    lengths: NDArray[np.int32]
    """Tokens of each sequence."""
    pointers: IntArray
    """Byte of the `.bin` at which each sequence starts."""
    bounds: IntArray
    """First sequence of each document, then their number."""
    item_bytes: int


def read_megatron(path: Path, request: Request) -> Iterator[IntArray]:
    """Chunks of the tokens of each document, or, with column "sequences", of each sequence.

    The two differ only where documents were split into sentences.  Where the `.bin` lies next to
    the index, every sequence must lie in it.  Raises CorpusError for a header of another kind, an
    index or `.bin` cut short, and sequences that belong to no document.
    """
    column = request.column or "documents"
    if column not in COLUMNS:
        raise request.error(f"has no column {column!r}; choose one of {', '.join(COLUMNS)}")
    index = _open_index(path, request)
    _check_bin(index, path.with_suffix(".bin"), request)
    if column == "documents":
        yield from _document_lengths(index, request)
        return
    for rows in request.chunks(len(index.lengths)):
        yield request.check_rows(index.lengths[rows.start : rows.stop], rows, "sequence")


def _open_index(path: Path, request: Request) -> _Index:
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        old = " (TNTIDX is the older, unmapped kind)" if head.startswith(b"TNTIDX") else ""
        raise request.error(f"is no Megatron index: it starts with {head[:9]!r}{old}")
    _, version, dtype, sequences, documents = _HEADER.unpack(head)
    if version != 1:
        raise request.error(f"is a Megatron index of version {version}; only 1 is known")
    if dtype not in _ITEM_BYTES:
        raise request.error(f"names the unknown token type {dtype}; known are 1 to 8")
    # The header decides the size of the file: any other means that it was cut short or damaged.
    size, end = path.stat().st_size, _HEADER.size + 12 * sequences + 8 * documents
    if size not in (end, end + sequences):  # with modes or without
        raise request.error(
            f"has {size} bytes; its header says {sequences} sequences and {documents} document "
            f"bounds, which take {end}: it is cut short or damaged"
        )
    data = np.memmap(path, dtype=np.uint8, mode="r")
    # Cut the bytes into header, lengths, pointers, documents and modes.  Two sequences of one
    # document each (three bounds): cuts at 34, 42, 58 and 82.
    ends = _HEADER.size + np.array([0, 4 * sequences, 12 * sequences, end - _HEADER.size])
    lengths, pointers, bounds = np.split(data, ends)[1:4]
    return _Index(lengths.view("<i4"), pointers.view("<i8"), bounds.view("<i8"), _ITEM_BYTES[dtype])


def _check_bin(index: _Index, data: Path, request: Request) -> None:
    """CorpusError where the `.bin` is there and does not hold all of a sequence."""
    if not data.is_file():
        return
    size = data.stat().st_size
    for rows in request.chunks(len(index.lengths)):
        starts = index.pointers[rows.start : rows.stop]
        lengths = index.lengths[rows.start : rows.stop].astype(np.int64)
        ends = starts + lengths * index.item_bytes
        if (i := first_true((starts < 0) | (ends > size))) is not None:
            problem = f"lies at bytes {starts[i]} to {ends[i]} of {data.name}, which has {size}"
            raise request.error(problem, rows[i], "sequence")


def _document_lengths(index: _Index, request: Request) -> Iterator[IntArray]:
    """Sums over the sequences of each document.

    Documents must start at sequence 0, hold at least one sequence each, and leave none over.
    """
    sequences = len(index.lengths)
    done = int(index.bounds[0]) if len(index.bounds) else 0
    if done:
        raise request.error(f"starts its documents at sequence {done}, not 0")
    for rows in request.chunks(len(index.bounds) - 1):
        bounds = index.bounds[rows.start : rows.stop + 1]
        if (i := first_true((np.diff(bounds) < 1) | (bounds[1:] > sequences))) is not None:
            problem = f"has the sequences {bounds[i]} to {bounds[i + 1]} of {sequences}"
            raise request.error(f"{problem}: none, or not there", rows[i], "document")
        first, done = int(bounds[0]), int(bounds[-1])
        lengths = index.lengths[first:done].astype(np.int64)
        if (i := first_true(lengths < 0)) is not None:
            raise request.error(f"{lengths[i]} is no length", first + i, "sequence")
        # Bounds 0 2 5 and lengths 3 4 1 1 1 give 7 3.
        yield request.check_rows(np.add.reduceat(lengths, bounds[:-1] - first), rows, "document")
    if done != sequences:
        raise request.error(
            f"has {sequences} sequences, of which its documents hold only {done}; it may be "
            "damaged (column='sequences' reads the sequences themselves)"
        )
