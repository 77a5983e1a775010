"""Real, long-tailed text that every machine has: the Python standard library's own source files.

A sample is one definition of a file: a function, a method, or the code between two of them, with
its decorators.  Most are short (a median of about 250 bytes) and a few fill a whole context, so
packs of equal length cost very unequal attention.  Tokens are bytes; one more token ends each
sample.  The same interpreter always gives the same corpus.
"""

from __future__ import annotations

import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

END_OF_SAMPLE = 256
VOCAB = 257

_NOT_THE_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
"""Installed packages, and tests, which some distributions leave out."""

_DEFINITION = re.compile(rb"^(?=(?: {4})?(?:def |class |async def |@))", re.MULTILINE)
"""The start of a line, at the margin or one level in, that opens a definition or decorates one."""


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Samples, one after the other."""

    tokens: NDArray[np.int64]
    """Token ids of all samples, [sum of lengths]."""
    lengths: NDArray[np.int64]
    """Tokens of each sample, its end token included, [samples]."""


def standard_library() -> Path:
    """Folder of this interpreter's own sources."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[Path]:
    """`.py` files under `root`, without tests and installed packages, sorted by relative path."""
    found: dict[str, Path] = {}
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_THE_LIBRARY]  # don't descend
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        found |= {path.relative_to(root).as_posix(): path for path in paths}
    return [path for _, path in sorted(found.items())]


def definitions(source: bytes) -> list[bytes]:
    """Cut a source file before each definition; decorators stay with their definition.

    Joining the samples gives the file again.
    """
    samples: list[bytes] = []
    pending = b""
    for piece in _DEFINITION.split(source):
        pending += piece
        if pending and not piece.lstrip().startswith(b"@"):
            samples.append(pending)
            pending = b""
    return [*samples, pending] if pending else samples


def load(*, tokens: int, longest: int, seed: int = 0, root: Path | None = None) -> Corpus:
    """At least `tokens` tokens of source, in an order drawn from `seed`.

    Samples are cut after `longest` tokens.  The last one may exceed `tokens`.
    Raises ValueError if `tokens` or `longest` is too small to hold text, or `root` holds less text
    than asked for.
    """
    if tokens < 1 or longest < 2:
        raise ValueError(
            f"a corpus of {tokens} tokens in samples of at most {longest}: need >= 1 and >= 2"
        )
    root = standard_library() if root is None else root
    pieces = [piece for path in source_files(root) for piece in definitions(path.read_bytes())]
    samples: list[bytes] = []
    total = 0
    for index in np.random.default_rng(seed).permutation(len(pieces)):
        if total >= tokens:
            break
        samples.append(pieces[index][: longest - 1])
        total += len(samples[-1]) + 1
    if total < tokens:
        raise ValueError(
            f"the sources under {root} hold {total} tokens but {tokens} are needed; "
            "ask for fewer steps, ranks or tokens"
        )
    lengths = np.array([len(sample) + 1 for sample in samples], dtype=np.int64)
    ids = np.full(total, END_OF_SAMPLE, dtype=np.int64)
    ends = np.cumsum(lengths) - 1
    is_text = np.ones(total, dtype=bool)
    is_text[ends] = False
    ids[is_text] = np.frombuffer(b"".join(samples), dtype=np.uint8)
    return Corpus(tokens=ids, lengths=lengths)
