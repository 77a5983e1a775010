"""Descriptions from the keys of a file: frozen dataclasses that check their own fields.

Every error is a ValueError that names the field and the value seen.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

Described = TypeVar("Described")


def from_keys(
    kind: type[Described],
    values: Mapping[str, Any],
    where: str,
    *,
    presets: Mapping[str, Described] | None = None,
) -> Described:
    """A `kind` from its fields in `values`; with `presets`, the key `preset` names one to change.

    `where` names the section in errors for keys that are unknown or missing; `kind` itself refuses
    values.
    """
    # A field without a default has the default MISSING.
    fields = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # any dataclass
    check_keys(values, (*fields, *(("preset",) if presets else ())), where)
    given = dict(values)
    if presets and "preset" in given:
        base = find_preset(where, given.pop("preset"), presets)
        return dataclasses.replace(base, **given)  # type: ignore[type-var]  # as above
    missing = [
        name
        for name, default in fields.items()
        if default is dataclasses.MISSING and name not in given
    ]
    if missing:
        instead = ", or name a preset" if presets else ""
        raise ValueError(f"{where} lacks {', '.join(missing)}; give every one{instead}")
    return kind(**given)


def find_preset(where: str, name: object, presets: Mapping[str, Described]) -> Described:
    """The preset `name`, in capitals or not.  The ValueError lists the presets."""
    found = presets.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{where} has no preset {name!r}; there are {', '.join(presets)}")
    return found


def read_presets(kind: type[Described], section: str) -> Mapping[str, Described]:
    """The presets of `presets.toml` whose sections are [section.name], by name."""
    found = preset_sections(section).items()
    return {name: from_keys(kind, values, f"[{section}.{name}]") for name, values in found}


def preset_sections(section: str) -> dict[str, dict[str, Any]]:
    """The sections [section.name] of `presets.toml`, by name."""
    text = files("libra.cost").joinpath("presets.toml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = tomllib.loads(text)[section]
    return found


def read_described(path: Path, make: Callable[[Any], Described], what: str = "") -> Described:
    """What `make` makes of the values in a JSON or TOML file, by its ending.

    ValueError that names the file where it cannot be read, and where `make` raises one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # broken JSON, TOML and UTF-8 are ValueErrors
        raise ValueError(f"cannot read {what}{path}: {error}") from error
    try:
        return make(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_keys(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """ValueError that names the unknown keys, each with the known key nearest to it."""
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
