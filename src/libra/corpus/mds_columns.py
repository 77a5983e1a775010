"""One column of an MDS shard: where it lies in each sample, and the length that it tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.corpus.errors import CorpusError, IntArray
from libra.corpus.request import Request, choose_column, needs_tokenizer
from libra.corpus.tokenizer import token_counter

_SCALARS: Final = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_ITEM_CODES: Final = {8: 1, 9: 1, 16: 2, 17: 2, 18: 2, 32: 4, 33: 4, 34: 4, 64: 8, 65: 8, 66: 8}
"""Bytes of an element by the code that arrays of no fixed type start with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    path: Path
    data: NDArray[np.uint8]
    """The file, mapped."""
    offsets: IntArray
    """Where each sample starts, then the end, [samples + 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsColumn:
    name: str
    encoding: str
    item: str | None
    """Type of the tokens in a column of bare bytes."""
    place: int
    sizes: tuple[int | None, ...]
    """Bytes of every column of a sample; None where they vary."""


def find_column(
    *, names: list[str], encodings: list[str], sizes: list[int | None], request: Request, file: Path
) -> MdsColumn:
    """The column that is asked for; `NAME:DTYPE` says the token type of a column of bytes."""
    asked, item = request.column, None
    if asked is not None and asked not in names and ":" in asked:
        asked, item = asked.rsplit(":", 1)
        if item not in _SCALARS:
            raise CorpusError(
                file, f"cannot hold tokens of type {item!r}; choose one of {_SCALARS}"
            )
    chosen = choose_column(
        Request(column=asked, tokenizer=request.tokenizer, chunk=request.chunk), names, file
    )
    place = names.index(chosen)
    encoding = encodings[place]
    if encoding == "bytes" and item is None:
        raise CorpusError(
            file,
            f"holds bytes in {chosen!r}; say the type of the tokens, as in "
            f"column='{chosen}:int64' or '{chosen}:int32'",
        )
    if encoding == "str" and request.tokenizer is None:
        raise needs_tokenizer(file, chosen)
    if encoding.split(":")[0] not in (*_SCALARS, "int", "str_int", "bytes", "str", "ndarray"):
        raise CorpusError(
            file, f"holds {encoding} in {chosen!r}; it must hold integers, arrays, bytes or text"
        )
    return MdsColumn(name=chosen, encoding=encoding, item=item, place=place, sizes=tuple(sizes))


def column_lengths(shard: Shard, column: MdsColumn, tokenizer: object) -> NDArray[Any]:
    """What the column tells of each sample's length, integers [samples], unchecked."""
    samples = len(shard.offsets) - 1
    kind, *details = column.encoding.split(":")
    if not samples:
        return np.empty(0, dtype=np.int64)
    if kind in ("int", *_SCALARS):
        dtype = np.dtype("int64" if kind == "int" else kind).newbyteorder("<")
        starts, _ = _places(shard, column)
        return _gather(shard, starts, dtype.itemsize).view(dtype).reshape(samples)
    if kind == "ndarray" and len(details) == 2:
        if "," in details[1]:
            raise CorpusError(shard.path, f"holds arrays of shape {details[1]} in {column.name!r}")
        return np.full(samples, int(details[1]))
    if kind == "bytes":
        assert column.item is not None
        return _counted(shard, column, _sizes(shard, column), np.dtype(column.item).itemsize)
    if kind == "ndarray" and details:
        return _array_lengths(shard, column, np.dtype(details[0]).itemsize)
    starts, sizes = _places(shard, column)
    if kind == "ndarray":
        return _typed_array_lengths(shard, column, starts, sizes)
    spans = zip(starts.tolist(), sizes.tolist(), strict=True)
    values = [shard.data[start : start + size].tobytes() for start, size in spans]
    try:
        texts = [value.decode() for value in values]
        if kind == "str_int":
            return np.array(list(map(int, texts)), dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise CorpusError(shard.path, f"holds no {kind} in {column.name!r}: {error}") from error
    return np.array(token_counter(tokenizer)(texts), dtype=np.int64)


def _sizes(shard: Shard, column: MdsColumn) -> IntArray:
    """Bytes of the column in each sample; from the offsets alone where no other column varies."""
    varying = [i for i, size in enumerate(column.sizes) if not size]
    if varying != [column.place]:
        return _places(shard, column)[1]
    fixed = 4 + sum(size for size in column.sizes if size)
    return np.asarray(np.diff(shard.offsets) - fixed)


def _places(shard: Shard, column: MdsColumn) -> tuple[IntArray, IntArray]:
    """Where the column starts in the shard, and its bytes, for every sample."""
    firsts = shard.offsets[:-1]
    varying = sum(not size for size in column.sizes)
    heads = _gather(shard, firsts, 4 * varying).view("<u4").astype(np.int64)
    starts = firsts + 4 * varying
    ends, own, at = starts.copy(), np.zeros_like(starts), 0
    for i, size in enumerate(column.sizes):
        if size:
            width = np.full(len(firsts), size, dtype=np.int64)
        else:
            width, at = heads[:, at], at + 1
        if i < column.place:
            starts = starts + width
        elif i == column.place:
            own = width
        ends += width
    wrong = np.flatnonzero(ends != shard.offsets[1:])
    if len(wrong):
        raise CorpusError(
            shard.path, "has columns that don't add up to the sample: it is damaged", int(wrong[0])
        )
    return starts, own


def _gather(shard: Shard, starts: IntArray, width: int) -> NDArray[np.uint8]:
    """`width` bytes from each of `starts`, [samples, width]."""
    if (starts + width).max() > len(shard.data):
        i = int(np.argmax(starts + width > len(shard.data)))
        raise CorpusError(shard.path, "ends outside the shard: it is damaged", i)
    return np.ascontiguousarray(shard.data[starts[:, None] + np.arange(width)])


def _counted(shard: Shard, column: MdsColumn, sizes: IntArray, item_bytes: int) -> IntArray:
    """Elements of `item_bytes` in each of `sizes`; CorpusError where they don't come out even."""
    wrong = np.flatnonzero((sizes < 0) | (sizes % item_bytes != 0))
    if len(wrong):
        i = int(wrong[0])
        problem = (
            f"{column.name!r} has {sizes[i]} bytes, no whole number of {item_bytes}-byte tokens"
        )
        raise CorpusError(shard.path, problem, i)
    return sizes // item_bytes


def _array_lengths(shard: Shard, column: MdsColumn, item_bytes: int) -> IntArray:
    """Elements of one-dimensional arrays from their bytes alone.

    An array starts with a byte for its axes and the width of its shape, then the shape: 1, 2 or 4
    bytes, the least that hold it.  So the width follows from the total.
    """
    sizes = _sizes(shard, column)
    starts, _ = _places(Shard(path=shard.path, data=shard.data, offsets=shard.offsets[:2]), column)
    axes = int(shard.data[starts[0]]) >> 2
    if axes != 1:
        raise CorpusError(shard.path, f"holds arrays of {axes} axes in {column.name!r}, not 1", 0)
    width = np.where(sizes <= 2 + 255 * item_bytes, 1, 2)
    width[sizes > 3 + 65535 * item_bytes] = 4
    return _counted(shard, column, sizes - 1 - width, item_bytes)


def _typed_array_lengths(
    shard: Shard, column: MdsColumn, starts: IntArray, sizes: IntArray
) -> IntArray:
    """Elements of one-dimensional arrays that start with their type, a byte, each."""
    heads = _gather(shard, starts, 2).astype(np.int64)
    item_bytes = np.array([_ITEM_CODES.get(code, 0) for code in range(256)])[heads[:, 0]]
    wrong = np.flatnonzero((item_bytes == 0) | (heads[:, 1] >> 2 != 1))
    if len(wrong):
        raise CorpusError(shard.path, f"{column.name!r} is no array of one axis", int(wrong[0]))
    values = sizes - 2 - (1 << (heads[:, 1] & 3))
    wrong = np.flatnonzero((values < 0) | (values % item_bytes != 0))
    if len(wrong):
        raise CorpusError(shard.path, f"{column.name!r} is cut short", int(wrong[0]))
    return np.asarray(values // item_bytes)
