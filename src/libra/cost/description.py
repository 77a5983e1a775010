"""Description files: the cluster, the model and how it is spread, in TOML.

    [cluster]
    preset = "h100"            # every other key overrides one of its values
    between_nodes = 25e9

    [model]
    preset = "qwen3-8b"

    [parallelism]
    dp = 16
    cp = 8
    global_batch = 128
    tokens = 262144

[model] and [parallelism] may be missing; keys are the fields of `Cluster`, `Model` and `Parallelism`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from libra.cost.hardware import CLUSTERS, Cluster
from libra.cost.models import MODELS, Model
from libra.cost.parallelism import Parallelism
from libra.cost.table_file import unknown_keys

Described = TypeVar("Described", Cluster, Model, Parallelism)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Contents of a description file; None for a section that it lacks."""

    cluster: Cluster
    model: Model | None = None
    parallelism: Parallelism | None = None


def describe(cluster: str) -> Description:
    """What `--cluster` names: a preset, or a description file with a [cluster] section.

    Raises ValueError.
    """
    path = Path(cluster)
    if cluster.lower() not in CLUSTERS and (path.suffix == ".toml" or path.exists()):
        return read_description(path)
    return Description(cluster=preset("cluster", cluster, CLUSTERS))


def read_description(path: Path) -> Description:
    """Read a description file.

    ValueError names the file, the section and the key: for a key that is unknown (with the nearest
    that is known), missing, of the wrong type or out of range.
    """
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # broken TOML and broken UTF-8 are ValueErrors
        raise ValueError(f"cannot read {path}: {error}") from error
    try:
        return parse_description(sections)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_description(sections: Mapping[str, Any]) -> Description:
    """The description in a parsed file.  Raises ValueError."""
    known = ("cluster", "model", "parallelism")
    unknown_keys(sections, known, "the file, outside any section")
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"{name} is {section!r}; it must be a section, [{name}]")
    cluster, model, parallelism = (sections.get(name) for name in known)
    described_model = None if model is None else _build(Model, model, "[model]", MODELS)
    spread = None if parallelism is None else _build(Parallelism, parallelism, "[parallelism]", {})
    if cluster is None:
        raise ValueError("there is no [cluster] section; add one, or name a preset")
    return Description(
        cluster=_build(Cluster, cluster, "[cluster]", CLUSTERS),
        model=described_model,
        parallelism=spread,
    )


def preset(kind: str, name: object, presets: Mapping[str, Described]) -> Described:
    """The preset `name`, capitals or not.  ValueError offers those there are."""
    found = presets.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{kind} has no preset {name!r}; there are {', '.join(presets)}")
    return found


def _build(
    kind: type[Described],
    section: Mapping[str, Any],
    where: str,
    presets: Mapping[str, Described],
) -> Described:
    fields: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(kind)}
    unknown_keys(section, (*fields, *(("preset",) if presets else ())), where)
    types = get_type_hints(kind)
    given: dict[str, Any] = {
        name: _typed(value, types[name], f"{name} in {where}")
        for name, value in section.items()
        if name in fields
    }
    if "preset" in section:
        return dataclasses.replace(preset(where, section["preset"], presets), **given)
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in given
    ]
    if missing:
        instead = ", or name a preset" if presets else ""
        raise ValueError(f"{where} lacks {', '.join(missing)}; give every one{instead}")
    return kind(**given)


def _typed(value: object, kind: Any, what: str) -> object:
    """`value`, if it is of a field's type; whole numbers pass for numbers."""
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(
            f"{what} is {value!r}; choose one of {', '.join(map(repr, get_args(kind)))}"
        )
    words = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not fits:
        raise ValueError(f"{what} is {value!r}; it must be {words[kind]}")
    return value
