"""Lengths from bytes that come in order, from a file or a pipe: integers as text, JSON lines, .npy.

Texts are counted with whatever tokenizer the user has.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.lib import format as npy_format

from libra.corpus.request import Request, show
from libra.data.lengths import MAX_LENGTH, IntArray
from libra.extras import require

CountTokens = Callable[[Sequence[str]], list[int]]

_NPY_HEADERS: Final = {  # version 3.0 is for field names, which no plain array has
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
}
_COMMENT: Final = re.compile(r"#[^\n]*")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_ONLY_INTEGERS: Final = re.compile(r"[-+0-9,\s]*")
_BLOCK: Final = 1 << 20
"""Bytes of text read at a time; no integer is longer."""
_LINES_AT_A_TIME: Final = 1 << 12


def read_text(stream: BinaryIO, request: Request) -> Iterator[IntArray]:
    """Chunks of the integers in UTF-8 text.

    One integer a line, or several with commas or white space between them.  `#` starts a comment
    that ends with its line; blank lines are skipped.  Raises CorpusError with the line, counted
    from 1, for anything else.
    """
    blocks = codecs.iterdecode(iter(lambda: stream.read(_BLOCK), b""), "utf-8-sig")
    line, rest = 1, ""
    try:
        # A block may end inside a number or a comment: that part waits for the next block.  The
        # last line may lack its end, so one is added.
        for block in chain(blocks, "\n"):
            whole, rest = _cut(rest + block)
            if whole:
                yield _integers(whole, line, request)
                line += whole.count("\n")
    except UnicodeDecodeError:
        raise request.error(
            "is neither of a known binary format nor text; a list of lengths is text with "
            "integers separated by commas or white space"
        ) from None


def _cut(text: str) -> tuple[str, str]:
    """Text up to the end of its last complete line, and the rest.

    Where no line ends, as in a list on one long line, up to the last complete word, or to the end
    of a word that is longer than any integer.
    """
    end = text.rfind("\n") + 1
    if not end and "#" not in text:
        end = max(map(text.rfind, " ,\t")) + 1 or (len(text) if len(text) > _BLOCK else 0)
    return text[:end], text[end:]


def _integers(text: str, first_line: int, request: Request) -> IntArray:
    bare = _COMMENT.sub("", text)
    # int() alone would also read digits of other scripts and underscores between digits.
    if _ONLY_INTEGERS.fullmatch(bare):
        with suppress(ValueError, OverflowError):
            lengths = np.array(list(map(int, _words(bare))), dtype=np.int64)
            if ((lengths >= 1) & (lengths <= MAX_LENGTH)).all():
                return lengths
    # Some word is no length: say which, and in which line.
    for number, line in enumerate(text.split("\n"), start=first_line):
        for word in _words(_COMMENT.sub("", line)):
            if not _INTEGER.fullmatch(word):
                problem = f"{show(word)} is no integer; a text file holds sample lengths"
                problem += " separated by commas or white space"
                raise request.error(problem, number, "line")
            request.check_rows(np.array([int(word)], dtype=object), [number], "line")
    raise AssertionError("some word of the text is no length")


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def read_jsonl(stream: BinaryIO, request: Request) -> Iterator[IntArray]:
    """Chunks of the samples' lengths: a length, a list of tokens or a text on each line.

    The first line decides which key is read and whether it holds lengths, lists or texts; every
    other line must be like it.  Blank lines are skipped.  Raises CorpusError with the line, counted
    from 1, for anything else.
    """
    values = _values(stream, request)
    while some := list(islice(values, min(request.chunk, _LINES_AT_A_TIME))):
        lines, columns, found = zip(*some, strict=True)
        count = token_counter(request, columns[0]) if isinstance(found[0], str) else list
        # Objects, because JSON's integers may be too large for an int64.
        yield request.check_rows(np.array(count(found), dtype=object), lines, "line")


def _values(stream: BinaryIO, request: Request) -> Iterator[tuple[int, str, Any]]:
    """Line numbers, the key that is read, and its value on each line, lists as their sizes."""
    first, column, kind = 0, "", object
    for line, fields in _objects(stream, request):
        if not first:
            first, column = line, request.choose_column(fields, line)
            kind = type(fields[column])
            if kind not in (int, list, str):
                problem = f"{column!r} is {show(fields[column])}; it must be an integer, a list of"
                raise request.error(f"{problem} tokens, or text", line, "line")
        if column not in fields:
            raise request.error(f"has no key {column!r}", line, "line")
        value = fields[column]
        if type(value) is not kind:
            problem = f"{column!r} is {show(value)}; line {first} has {kind.__name__} there"
            raise request.error(problem, line, "line")
        # Of a list only its size is kept: a batch of rows may hold millions of tokens.
        yield line, column, len(value) if isinstance(value, list) else value


def _objects(stream: BinaryIO, request: Request) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and JSON objects."""
    decode = json.JSONDecoder().raw_decode  # a third of the time of json.loads on bytes
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
            if not text:
                continue
            row, end = decode(text)
            if end < len(text):
                raise ValueError(f"something follows after its character {end}")
        except (ValueError, RecursionError) as error:
            raise request.error(f"{show(line)} is no JSON ({error})", number, "line") from None
        if not isinstance(row, dict):
            problem = f'{show(row)} is no JSON object such as {{"length": 7}}'
            raise request.error(problem, number, "line")
        yield number, row


def read_npy(stream: BinaryIO, request: Request) -> Iterator[IntArray]:
    """Chunks of the integers of one saved array, never unpickled.

    Read, not mapped: pages of a map count as the process's memory until the system takes them
    back, and a pipe cannot be mapped.  Raises CorpusError for objects, floats, more than one
    dimension, an array cut short, and bytes behind it.
    """
    count, dtype = _npy_header(stream, request)
    for rows in request.chunks(count):
        data = stream.read(len(rows) * dtype.itemsize)
        if len(data) < len(rows) * dtype.itemsize:
            problem = f"is cut short: its header says {count} rows, it ends"
            raise request.error(problem, rows.start + len(data) // dtype.itemsize)
        yield request.check_rows(np.frombuffer(data, dtype=dtype), rows)
    # Two arrays saved into one file would otherwise lose the second.
    if stream.read(1):
        problem = f"goes on after the {count} rows of its array; save all lengths as one array"
        raise request.error(problem)


def _npy_header(stream: BinaryIO, request: Request) -> tuple[int, np.dtype[np.generic]]:
    try:
        version = npy_format.read_magic(stream)
        if version not in _NPY_HEADERS:
            raise ValueError(f"format version {version}")
        shape, _, dtype = _NPY_HEADERS[version](stream)
    except (ValueError, EOFError) as error:
        raise request.error(f"is no .npy array of integers: {error}") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        kind = "Python objects" if dtype.hasobject else str(dtype)
        problem = f"holds {kind} of shape {shape}; it must hold integers in one dimension"
        raise request.error(f"{problem}, one length a sample")
    return shape[0], dtype


def token_counter(request: Request, column: str) -> CountTokens:
    """A function from texts to their token counts, special tokens as the tokenizer adds them.

    The tokenizer is a function from a text to its tokens or their number (transformers' is one), an
    object with `encode` or `encode_batch` (tokenizers, tiktoken), the path of a `tokenizer.json`,
    or a name that transformers or tokenizers knows.  Raises ValueError for anything else, and
    CorpusError where none is given.
    """
    tokenizer = request.tokenizer
    if tokenizer is None:
        problem = f"holds text in {column!r}; give a tokenizer to count its tokens, or name"
        raise request.error(f"{problem} a column of lengths or token lists")
    if isinstance(tokenizer, str | Path):
        tokenizer = _load_tokenizer(str(tokenizer))
    batch = getattr(tokenizer, "encode_batch", None)
    if callable(batch):
        return lambda texts: [len(tokens) for tokens in batch(list(texts))]
    one = tokenizer if callable(tokenizer) else getattr(tokenizer, "encode", None)
    if not callable(one):
        raise ValueError(
            f"tokenizer is {tokenizer!r}; it must be a function from text to tokens, an object "
            "with encode, the path of a tokenizer.json, or a name"
        )
    return lambda texts: [_token_count(one(text)) for text in texts]


@cache
def _load_tokenizer(name: str) -> Any:
    """The tokenizer of a tokenizer.json, else of a name, from tokenizers or transformers."""
    is_file = Path(name).is_file()
    library = "transformers" if find_spec("transformers") and not is_file else "tokenizers"
    module = require(library, f"tokenizer {name!r} (lengths would need none)")
    kind = module.AutoTokenizer if library == "transformers" else module.Tokenizer
    try:
        return kind.from_file(name) if is_file else kind.from_pretrained(name)
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
