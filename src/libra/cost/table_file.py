"""Kernel tables in files, JSON or TOML by the file's ending; `libra calibrate` writes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from libra.cost.fields import from_keys, read_keys
from libra.cost.kernel_table import KernelTable

FORMAT: Final = "libra-kernel-table"
VERSION: Final = 1
SUFFIXES: Final = (".json", ".toml")


def check_suffix(path: Path) -> None:
    """ValueError for a file that is neither .json nor .toml."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}; a kernel table is a .json or .toml file")


def write_kernel_table(table: KernelTable, path: Path) -> None:
    """Write `table`; the same table gives the same bytes.  Raises ValueError and OSError."""
    check_suffix(path)
    values: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for field in dataclasses.fields(KernelTable):
        value = getattr(table, field.name)
        if value is not None:  # TOML has no null
            values[field.name] = value.tolist() if isinstance(value, np.ndarray) else value
    # A line a key.  These values are spelled alike in JSON and TOML.
    lines = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    if path.suffix == ".json":
        text = "{\n" + ",\n".join(f'  "{name}": {line}' for name, line in lines.items()) + "\n}\n"
    else:
        text = "".join(f"{name} = {line}\n" for name, line in lines.items())
    path.write_text(text, encoding="utf-8")


def read_kernel_table(path: Path) -> KernelTable:
    """Read a table.  ValueError names the file and what is wrong in it."""
    check_suffix(path)
    values = read_keys(path, "kernel table ")
    try:
        return _table(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _table(values: object) -> KernelTable:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"not a kernel table: it has no format = {FORMAT!r}")
    # A newer version may change the meaning of a field, so nothing is guessed.
    if values.get("version") != VERSION:
        raise ValueError(
            f"a kernel table of version {values.get('version')!r}; this libra reads version "
            f"{VERSION}: run `libra calibrate` again"
        )
    fields = {name: value for name, value in values.items() if name not in ("format", "version")}
    return from_keys(KernelTable, fields, "the kernel table")
