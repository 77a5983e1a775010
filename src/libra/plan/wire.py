"""Integer arrays as one flat buffer, and back: how a plan travels.

    magic | version | arrays | item size and length of each | the arrays, one after the other |
    checksum

Nothing is unpickled; a foreign, damaged or truncated buffer is refused.  All words are
little-endian int64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = int.from_bytes(b"LIBRAPLN", "little")
_VERSION = 3
_CHECKSUM_BYTES = 8


def pack(arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """One buffer, uint8, of int32 and int64 arrays."""
    header = [_MAGIC, _VERSION, len(arrays)]
    for array in arrays:
        header += [array.itemsize, array.size]
    body = np.array(header, dtype="<i8").tobytes()
    body += b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return np.frombuffer(body + _checksum(body), dtype=np.uint8)


def unpack(buffer: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """The arrays of a buffer made by `pack`.  Raises ValueError for any other buffer."""
    data = np.ascontiguousarray(buffer).tobytes()
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(body) < 24:
        raise ValueError(f"a plan buffer of {len(data)} bytes is truncated")
    magic, version, count = np.frombuffer(body, "<i8", 3).tolist()
    if magic != _MAGIC:
        raise ValueError("the buffer is not a Libra plan: its first bytes are foreign")
    if version != _VERSION:
        raise ValueError(f"plan buffer version {version}; this build reads version {_VERSION}")
    if checksum != _checksum(body):
        raise ValueError("the plan buffer is truncated or damaged: its checksum differs")
    shapes = np.frombuffer(body, "<i8", 2 * count, 24).reshape(count, 2).tolist()
    at, arrays = 24 + 16 * count, []
    for item_size, length in shapes:
        data_type = np.int32 if item_size == 4 else np.int64
        arrays.append(np.frombuffer(body, data_type, length, at))
        at += item_size * length
    return arrays


def fingerprint(data: bytes) -> int:
    """63-bit hash."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
