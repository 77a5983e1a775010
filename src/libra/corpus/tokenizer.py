"""Counting the tokens of texts with whatever tokenizer the user has."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

CountTokens = Callable[[list[str]], list[int]]


def token_counter(tokenizer: object) -> CountTokens:
    """A function from texts to their token counts, special tokens as the tokenizer adds them.

    `tokenizer` is a function from a text to its tokens or their number (transformers' is one), an
    object with `encode` or `encode_batch` (tokenizers, tiktoken), the path of a `tokenizer.json`,
    or a name that transformers or tokenizers knows.  Raises ValueError for anything else.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(str(tokenizer))
    batch = getattr(tokenizer, "encode_batch", None)
    if callable(batch):
        return lambda texts: [len(tokens) for tokens in batch(texts)]
    one = tokenizer if callable(tokenizer) else getattr(tokenizer, "encode", None)
    if not callable(one):
        raise ValueError(
            f"tokenizer is {tokenizer!r}; it must be a function from text to tokens, an object "
            "with encode, the path of a tokenizer.json, or a name"
        )
    return lambda texts: [_tokens(one(text)) for text in texts]


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a tokenizer.json, else of a name; needs tokenizers or transformers."""
    if Path(name).is_file():
        library = _library("tokenizers", name)
        make: Callable[[str], Any] = library.Tokenizer.from_file
    else:
        try:
            make = _library("transformers", name).AutoTokenizer.from_pretrained
        except ValueError:
            make = _library("tokenizers", name).Tokenizer.from_pretrained
    try:
        return make(name)
    except Exception as error:  # each library and its hub have errors of their own
        raise ValueError(f"tokenizer {name!r} cannot be loaded: {error}") from error


def _library(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"tokenizer {name!r} needs a library that is not installed: pip install tokenizers; or "
            "give lengths instead of texts"
        ) from None


def _tokens(encoded: Any) -> int:
    """Tokens of what a tokenizer returned: a list, its size, or an object with `input_ids`."""
    if isinstance(encoded, int):
        return encoded
    try:
        return len(encoded["input_ids"])
    except (TypeError, KeyError, IndexError):
        return len(encoded)
