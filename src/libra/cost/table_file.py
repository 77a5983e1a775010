"""Kernel tables in files, JSON or TOML by the file's ending; `libra calibrate` writes them."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from libra.cost.kernel_table import KernelTable

FORMAT: Final = "libra-kernel-table"
VERSION: Final = 1
SUFFIXES: Final = (".json", ".toml")
_ARRAYS: Final = ("q_len", "k_per_q", "heads", "forward", "backward")
_SCALARS: Final = ("source", "peak_flops", "key_dim", "value_dim")
_OPTIONAL: Final = ("call_seconds", "matmul_flops")


def check_suffix(path: Path) -> None:
    """ValueError for a file that is neither .json nor .toml."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}; a kernel table is a .json or .toml file")


def write_kernel_table(table: KernelTable, path: Path) -> None:
    """Write `table`; the same table gives the same bytes.  Raises ValueError and OSError."""
    check_suffix(path)
    values: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    values |= {name: getattr(table, name) for name in _SCALARS + _OPTIONAL}
    values |= {name: getattr(table, name).tolist() for name in _ARRAYS}
    # A line a key.  These values are spelled alike in JSON and TOML, which has no null.
    lines = [
        (json.dumps(name), json.dumps(value, ensure_ascii=False))
        for name, value in values.items()
        if value is not None
    ]
    if path.suffix == ".json":
        text = "{\n" + ",\n".join(f"  {name}: {value}" for name, value in lines) + "\n}\n"
    else:
        text = "".join(f"{name.strip(chr(34))} = {value}\n" for name, value in lines)
    path.write_text(text, encoding="utf-8")


def read_kernel_table(path: Path) -> KernelTable:
    """Read a table.  ValueError names the file and what is wrong in it."""
    check_suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # both libraries' errors are ValueErrors
        raise ValueError(f"cannot read kernel table {path}: {error}") from error
    try:
        return _table(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def unknown_keys(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """ValueError that names the keys that are not known, each with the nearest that is."""
    known = tuple(known)
    parts = []
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            parts.append(f"{key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if parts:
        noun = "key" if len(parts) == 1 else "keys"
        raise ValueError(
            f"unknown {noun} {', '.join(parts)} in {where}; known are {', '.join(known)}"
        )


def _table(values: object) -> KernelTable:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"not a kernel table: it has no format = {FORMAT!r}")
    if values.get("version") != VERSION:
        raise ValueError(
            f"a kernel table of version {values.get('version')!r}; this libra reads version "
            f"{VERSION}: run `libra calibrate` again"
        )
    needed = _SCALARS + _ARRAYS
    unknown_keys(values, ("format", "version", *needed, *_OPTIONAL), "the kernel table")
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"the kernel table lacks {', '.join(missing)}")
    fields = {name: values[name] for name in needed + _OPTIONAL if name in values}
    for name in _ARRAYS:
        if not isinstance(fields[name], list):
            raise ValueError(f"{name} is {fields[name]!r}; it must be a list of numbers")
        fields[name] = _array(name, fields[name])
    return KernelTable(**fields)


def _array(name: str, values: list[Any]) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is not a regular list of numbers: {error}") from error
