"""Lengths that numpy saved: one array of integers, read piece by piece and never unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from libra.corpus.errors import CorpusError, IntArray, check_rows
from libra.corpus.request import Request

MAGIC = b"\x93NUMPY"


def read_npy(stream: BinaryIO, file: str, request: Request) -> Iterator[IntArray]:
    """Chunks of the array's integers.

    Read, not mapped: pages of a map count as the process's memory until the system takes them
    back, and a pipe cannot be mapped.  Raises CorpusError for objects, floats, more than one
    dimension, an array cut short, and bytes behind it.
    """
    rows, dtype = _read_header(stream, file)
    for first in range(0, rows, request.chunk):
        wanted = min(request.chunk, rows - first)
        data = stream.read(wanted * dtype.itemsize)
        if len(data) < wanted * dtype.itemsize:
            there = first + len(data) // dtype.itemsize
            raise CorpusError(file, f"is cut short: its header says {rows} rows, it ends", there)
        yield check_rows(np.frombuffer(data, dtype=dtype), file, first=first)
    if stream.read(1):
        raise CorpusError(
            file, f"goes on after the {rows} rows of its array; save all lengths as one array"
        )


def _read_header(stream: BinaryIO, file: str) -> tuple[int, np.dtype[np.generic]]:
    try:
        version = npy_format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = npy_format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = npy_format.read_array_header_2_0(stream)
        else:  # 3.0 is for field names, which no plain array has
            raise ValueError(f"format version {version}")
    except (ValueError, EOFError) as error:
        raise CorpusError(file, f"is no .npy array of integers: {error}") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        kind = "Python objects" if dtype.hasobject else str(dtype)
        raise CorpusError(
            file,
            f"holds {kind} of shape {shape}; it must hold integers in one dimension, one length a "
            "sample",
        )
    return shape[0], dtype
