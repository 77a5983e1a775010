"""JSON lines: a length, a list of tokens, or a text to be counted by a tokenizer, on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

import numpy as np

from libra.corpus.errors import CorpusError, IntArray, out_of_range, show
from libra.corpus.request import Request, choose_column, needs_tokenizer
from libra.corpus.tokenizer import CountTokens, token_counter
from libra.data.lengths import MAX_LENGTH

ROWS_AT_A_TIME = 1 << 16
TEXTS_AT_A_TIME = 1 << 10
_BLANKS = " \t\r\n"


def read_jsonl(stream: BinaryIO, file: str, request: Request) -> Iterator[IntArray]:
    """Chunks of the samples' lengths.

    The first line decides which key is read and whether it holds lengths, lists or texts; every
    other line must be like it.  Blank lines mean nothing.  Raises CorpusError with the line,
    counted from 1, for anything else.
    """
    rows = _objects(stream, file)
    first = next(rows, None)
    if first is None:
        return
    column = choose_column(request, first[1], f"{file}, line {first[0]},")
    kind = type(first[1][column])
    if kind is str and request.tokenizer is None:
        raise needs_tokenizer(file, column)
    count = token_counter(request.tokenizer) if kind is str else None
    values = _values(first, rows, column, kind, file)
    at_a_time = min(request.chunk, ROWS_AT_A_TIME if count is None else TEXTS_AT_A_TIME)
    while some := list(islice(values, at_a_time)):
        yield _lengths(some, kind, count, file)


def _objects(stream: BinaryIO, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    decode = json.JSONDecoder().raw_decode  # a third of the time of json.loads on bytes
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(_BLANKS)
            if not text:
                continue
            row, end = decode(text)
            if end < len(text):
                raise ValueError(f"something follows after its character {end}")
        except (ValueError, RecursionError) as error:
            raise CorpusError(file, f"{show(line)} is no JSON ({error})", number, "line") from None
        if not isinstance(row, dict):
            raise CorpusError(
                file, f'{show(row)} is no JSON object such as {{"length": 7}}', number, "line"
            )
        yield number, row


def _values(
    first: tuple[int, dict[str, Any]],
    rows: Iterator[tuple[int, dict[str, Any]]],
    column: str,
    kind: type,
    file: str,
) -> Iterator[tuple[int, Any]]:
    """The line and the key's value of each row, lists as their sizes."""
    if kind not in (int, list, str):
        odd = first[1][column]
        problem = f"{column!r} is {show(odd)}; it must be an integer, a list of tokens, or text"
        raise CorpusError(file, problem, first[0], "line")
    row: tuple[int, dict[str, Any]] | None = first
    while row is not None:
        number, fields = row
        if column not in fields:
            raise CorpusError(file, f"has no key {column!r}", number, "line")
        value = fields[column]
        if type(value) is not kind:
            problem = f"{column!r} is {show(value)}; line {first[0]} has {kind.__name__} there"
            raise CorpusError(file, problem, number, "line")
        yield number, len(fields[column]) if kind is list else value
        row = next(rows, None)


def _lengths(
    rows: list[tuple[int, Any]], kind: type, count: CountTokens | None, file: str
) -> IntArray:
    values = [value for _, value in rows]
    if count is not None:
        values = count(values)
    if min(values) < 1 or max(values) > MAX_LENGTH:
        at = next(i for i, value in enumerate(values) if not 1 <= value <= MAX_LENGTH)
        raise out_of_range(values[at], file, rows[at][0], "line")
    return np.array(values, dtype=np.int64)
