"""What a user asks of a reader, the names that columns usually have, and extras to install."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from libra.corpus.errors import CorpusError

LENGTH_COLUMNS: Final = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len")
TOKEN_COLUMNS: Final = ("input_ids", "tokens")
TEXT_COLUMNS: Final = ("text", "content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    column: str | None = None
    """The column or key that tells a sample's length; None to look for a usual name."""
    tokenizer: object = None
    """Counts the tokens of a text, see `libra.corpus.tokenizer`."""
    chunk: int = 1 << 20
    """Rows read at a time, at most."""


def choose_column(request: Request, names: Iterable[str], file: Path | str) -> str:
    """The column to read: the one asked for, else the first usual name that is there.

    Usual names are lengths, then token lists; texts come first where a tokenizer is given and
    aren't looked for otherwise.  Raises CorpusError where there is none.
    """
    present = list(names)
    if request.column is not None:
        if request.column in present:
            return request.column
        raise CorpusError(file, f"has no column {request.column!r}; it has {_listed(present)}")
    usual = [*LENGTH_COLUMNS, *TOKEN_COLUMNS]
    if request.tokenizer is not None:
        usual = [*TEXT_COLUMNS, *usual]
    for name in usual:
        if name in present:
            return name
    more = "" if request.tokenizer is not None else ", or a text column and a tokenizer"
    raise CorpusError(
        file,
        f"has none of the usual columns {', '.join(usual)}; name one of {_listed(present)} as the "
        f"column of lengths or token lists{more}",
    )


def needs_tokenizer(file: Path | str, column: str) -> CorpusError:
    return CorpusError(
        file,
        f"holds text in {column!r}; give a tokenizer to count its tokens, or name a column of "
        "lengths or token lists",
    )


def require_pyarrow(module: str, file: Path | str) -> Any:
    """A pyarrow module; CorpusError naming the extra where pyarrow is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise CorpusError(
            file,
            "needs pyarrow, which is not installed; install the extra `corpus`: "
            "pip install 'libra-attention[corpus]'",
        ) from None


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:20]))
    return f"{shown}, ..." if len(names) > 20 else shown or "no column"
