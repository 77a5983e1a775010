"""A plain list of lengths, as a person, a script or a pipe writes it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from libra.corpus.errors import CorpusError, IntArray, out_of_range, show
from libra.corpus.request import Request
from libra.data.lengths import MAX_LENGTH

_COMMENT = re.compile(r"#[^\n]*")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_BYTES_PER_ROW = 8
_BLOCK = _LONGEST_WORD = 1 << 20


def read_text(stream: BinaryIO, file: str, request: Request) -> Iterator[IntArray]:
    """Chunks of the integers in UTF-8 text.

    One integer a line, or several with commas or white space between them.  `#` starts a comment
    that ends with its line; blank lines mean nothing.  Raises CorpusError with the line, counted
    from 1, for anything else.
    """
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    line, rest = 1, ""
    while True:
        try:
            block = text.read(min(request.chunk * _BYTES_PER_ROW, _BLOCK))
        except UnicodeDecodeError:
            raise CorpusError(
                file,
                "is neither of a known binary format nor text; a list of lengths is text with "
                "integers separated by commas or white space",
            ) from None
        whole, rest = _cut(rest + block) if block else (rest, "")
        if not whole and len(rest) > _LONGEST_WORD and "#" not in rest:
            whole, rest = rest, ""  # no integer, and no end of it in sight
        if whole:
            yield _integers(whole, file, line)
            line += whole.count("\n")
        if not block:
            return


def _cut(text: str) -> tuple[str, str]:
    """Text up to the end of its last complete line, and the rest.

    Where there is no line's end, as in a list on one long line, up to its last complete word.
    """
    end = text.rfind("\n") + 1
    if not end and "#" not in text:
        end = max(map(text.rfind, (" ", ",", "\t"))) + 1
    return text[:end], text[end:]


def _integers(text: str, file: str, first_line: int) -> IntArray:
    words = _words(_COMMENT.sub("", text) if "#" in text else text)
    # int() also reads digits of other scripts and underscores between digits
    plain = (text.isascii() and "_" not in text) or all(map(_INTEGER.fullmatch, words))
    try:
        lengths = np.array(list(map(int, words)) if plain else None, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise _first_odd_word(text, file, first_line) from None
    if len(lengths) and (lengths.min() < 1 or lengths.max() > MAX_LENGTH):
        raise _first_odd_word(text, file, first_line)
    return lengths


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _first_odd_word(text: str, file: str, first_line: int) -> CorpusError:
    """Say where a text stops being a list of lengths."""
    for number, line in enumerate(text.split("\n"), start=first_line):
        for word in _words(_COMMENT.sub("", line)):
            if not _INTEGER.fullmatch(word):
                problem = (
                    f"{show(word)} is no integer; a text file holds sample lengths separated by "
                    "commas or white space"
                )
                return CorpusError(file, problem, number, "line")
            value = int(word) if len(word) <= 20 else word
            if isinstance(value, str) or not 1 <= value <= MAX_LENGTH:
                return out_of_range(value, file, number, "line")
    raise AssertionError("some word of the text is no length")
