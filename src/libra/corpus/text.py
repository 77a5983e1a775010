"""Lengths from bytes that come in order, from a file or a pipe: integers as text, JSON lines, .npy.

Texts are counted with whatever tokenizer the user has.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.lib import format as npy_format

from libra.corpus.request import (
    CorpusError,
    IntArray,
    Request,
    check_rows,
    choose_column,
    show,
)
from libra.data.lengths import MAX_LENGTH
from libra.extras import require

CountTokens = Callable[[list[str]], list[int]]

NPY_MAGIC: Final = b"\x93NUMPY"
_NPY_HEADERS: Final = {  # version 3.0 is for field names, which no plain array has
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
}
_COMMENT: Final = re.compile(r"#[^\n]*")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_ONLY_INTEGERS: Final = re.compile(r"[-+0-9,\s]*")
_BYTES_PER_ROW: Final = 8
_BLOCK: Final = 1 << 20
"""Most characters of text read at a time; no integer is longer."""
_ROWS_AT_A_TIME: Final = 1 << 16
_TEXTS_AT_A_TIME: Final = 1 << 10
_BLANKS: Final = " \t\r\n"


def read_text(stream: BinaryIO, file: str, request: Request) -> Iterator[IntArray]:
    """Chunks of the integers in UTF-8 text.

    One integer a line, or several with commas or white space between them.  `#` starts a comment
    that ends with its line; blank lines are skipped.  Raises CorpusError with the line, counted
    from 1, for anything else.
    """
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    line, rest, block = 1, "", "first"
    while block:
        try:
            block = text.read(min(request.chunk * _BYTES_PER_ROW, _BLOCK))
        except UnicodeDecodeError:
            raise CorpusError(
                file,
                "is neither of a known binary format nor text; a list of lengths is text with "
                "integers separated by commas or white space",
            ) from None
        # A block may end inside a number or a comment: keep that part for the next block.
        whole, rest = _cut(rest + block) if block else (rest, "")
        if not whole and len(rest) > _BLOCK and "#" not in rest:
            whole, rest = rest, ""  # no integer is as long as this word
        if whole:
            yield _integers(whole, file, line)
            line += whole.count("\n")


def _cut(text: str) -> tuple[str, str]:
    """Text up to the end of its last complete line, and the rest.

    Where no line ends, as in a list on one long line, up to the last complete word.
    """
    end = text.rfind("\n") + 1
    if not end and "#" not in text:
        end = max(map(text.rfind, (" ", ",", "\t"))) + 1
    return text[:end], text[end:]


def _integers(text: str, file: str, first_line: int) -> IntArray:
    bare = _COMMENT.sub("", text)
    # int() alone would also read digits of other scripts and underscores between digits.
    if _ONLY_INTEGERS.fullmatch(bare):
        with suppress(ValueError, OverflowError):
            lengths = np.array(list(map(int, _words(bare))), dtype=np.int64)
            if not len(lengths) or (lengths.min() >= 1 and lengths.max() <= MAX_LENGTH):
                return lengths
    # Some word is no length: say which, and in which line.
    for number, line in enumerate(text.split("\n"), start=first_line):
        for word in _words(_COMMENT.sub("", line)):
            if not _INTEGER.fullmatch(word):
                problem = f"{show(word)} is no integer; a text file holds sample lengths"
                problem += " separated by commas or white space"
                raise CorpusError(file, problem, number, "line")
            check_rows(np.array([int(word)], dtype=object), file, [number], "line")
    raise AssertionError("some word of the text is no length")


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def read_jsonl(stream: BinaryIO, file: str, request: Request) -> Iterator[IntArray]:
    """Chunks of the samples' lengths: a length, a list of tokens or a text on each line.

    The first line decides which key is read and whether it holds lengths, lists or texts; every
    other line must be like it.  Blank lines are skipped.  Raises CorpusError with the line, counted
    from 1, for anything else.
    """
    rows = _objects(stream, file)
    first = next(rows, None)
    if first is None:
        return
    number, fields = first
    column = choose_column(request, fields, f"{file}, line {number},")
    kind = type(fields[column])
    if kind not in (int, list, str):
        problem = f"{column!r} is {show(fields[column])}"
        raise CorpusError(
            file, f"{problem}; it must be an integer, a list of tokens, or text", number, "line"
        )
    count = token_counter(request, column, file) if kind is str else None
    values = _values(chain([first], rows), column, kind, file)
    at_a_time = min(request.chunk, _ROWS_AT_A_TIME if count is None else _TEXTS_AT_A_TIME)
    while some := list(islice(values, at_a_time)):
        lengths = [value for _, value in some]
        if count is not None:
            lengths = count(lengths)
        # Objects, because JSON's integers may be too large for an int64.
        yield check_rows(np.array(lengths, dtype=object), file, [row for row, _ in some], "line")


def _objects(stream: BinaryIO, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and JSON objects."""
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
    rows: Iterator[tuple[int, dict[str, Any]]], column: str, kind: type, file: str
) -> Iterator[tuple[int, Any]]:
    """Line numbers and the key's value of each row, lists as their sizes."""
    first_line = 0
    for number, fields in rows:
        first_line = first_line or number
        if column not in fields:
            raise CorpusError(file, f"has no key {column!r}", number, "line")
        value = fields[column]
        if type(value) is not kind:
            problem = f"{column!r} is {show(value)}; line {first_line} has {kind.__name__} there"
            raise CorpusError(file, problem, number, "line")
        # Of a list only its size is kept: a batch of rows may hold millions of tokens.
        yield number, len(value) if isinstance(value, list) else value


def read_npy(stream: BinaryIO, file: str, request: Request) -> Iterator[IntArray]:
    """Chunks of the integers of one saved array, never unpickled.

    Read, not mapped: pages of a map count as the process's memory until the system takes them
    back, and a pipe cannot be mapped.  Raises CorpusError for objects, floats, more than one
    dimension, an array cut short, and bytes behind it.
    """
    rows, dtype = _npy_header(stream, file)
    for first in range(0, rows, request.chunk):
        wanted = min(request.chunk, rows - first)
        data = stream.read(wanted * dtype.itemsize)
        if len(data) < wanted * dtype.itemsize:
            there = first + len(data) // dtype.itemsize
            raise CorpusError(file, f"is cut short: its header says {rows} rows, it ends", there)
        yield check_rows(np.frombuffer(data, dtype=dtype), file, range(first, first + wanted))
    # Two arrays saved into one file would otherwise lose the second.
    if stream.read(1):
        raise CorpusError(
            file, f"goes on after the {rows} rows of its array; save all lengths as one array"
        )


def _npy_header(stream: BinaryIO, file: str) -> tuple[int, np.dtype[np.generic]]:
    try:
        version = npy_format.read_magic(stream)
        if version not in _NPY_HEADERS:
            raise ValueError(f"format version {version}")
        shape, _, dtype = _NPY_HEADERS[version](stream)
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


def token_counter(request: Request, column: str, file: Path | str) -> CountTokens:
    """A function from texts to their token counts, special tokens as the tokenizer adds them.

    The tokenizer is a function from a text to its tokens or their number (transformers' is one), an
    object with `encode` or `encode_batch` (tokenizers, tiktoken), the path of a `tokenizer.json`,
    or a name that transformers or tokenizers knows.  Raises ValueError for anything else, and
    CorpusError where none is given.
    """
    tokenizer = request.tokenizer
    if tokenizer is None:
        raise CorpusError(
            file,
            f"holds text in {column!r}; give a tokenizer to count its tokens, or name a column of "
            "lengths or token lists",
        )
    if isinstance(tokenizer, str | Path):
        tokenizer = _load_tokenizer(str(tokenizer))
    batch = getattr(tokenizer, "encode_batch", None)
    if callable(batch):
        return lambda texts: [len(tokens) for tokens in batch(texts)]
    one = tokenizer if callable(tokenizer) else getattr(tokenizer, "encode", None)
    if not callable(one):
        raise ValueError(
            f"tokenizer is {tokenizer!r}; it must be a function from text to tokens, an object "
            "with encode, the path of a tokenizer.json, or a name"
        )
    return lambda texts: [_token_count(one(text)) for text in texts]


def _load_tokenizer(name: str) -> Any:
    """The tokenizer of a tokenizer.json, else of a name, from tokenizers or transformers."""
    is_file = Path(name).is_file()
    library = "transformers" if find_spec("transformers") and not is_file else "tokenizers"
    module = require(library, f"tokenizer {name!r} (lengths would need none)")
    if library == "transformers":
        make = module.AutoTokenizer.from_pretrained
    else:
        make = module.Tokenizer.from_file if is_file else module.Tokenizer.from_pretrained
    try:
        return make(name)
    except Exception as error:  # each library and its hub raise errors of their own
        raise ValueError(f"tokenizer {name!r} cannot be loaded: {error}") from error


def _token_count(encoded: Any) -> int:
    """Tokens in a tokenizer's result: a list, its size, or an object with `input_ids`."""
    if isinstance(encoded, int):
        return encoded
    try:
        return len(encoded["input_ids"])
    except (TypeError, KeyError, IndexError):
        return len(encoded)
