"""Bytes of a file or of standard input, unzipped, and the first of them to tell the format by."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

HEAD_BYTES: Final = 4096
_GZIP: Final = b"\x1f\x8b"


@contextmanager
def open_stream(path: Path | None) -> Iterator[tuple[bytes, BinaryIO]]:
    """The first bytes, and a stream of all bytes, those included.

    `path` None is standard input, which is left open.
    """
    source = cast(BinaryIO, sys.stdin.buffer) if path is None else path.open("rb")
    try:
        head, stream = _peeked(source, len(_GZIP))
        if head == _GZIP:
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=stream))
        yield _peeked(stream, HEAD_BYTES)
    finally:
        if path is not None:
            source.close()


def _peeked(stream: BinaryIO, count: int) -> tuple[bytes, BinaryIO]:
    head = stream.read(count)
    return head, cast(BinaryIO, io.BufferedReader(_Rejoined(head, stream), 1 << 20))


class _Rejoined(io.RawIOBase):
    """A stream with what was read of it put back in front: pipes cannot be rewound."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__()
        self._head = io.BytesIO(head)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head.read(len(buffer)) or self._rest.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
