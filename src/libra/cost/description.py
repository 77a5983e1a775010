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

[model] and [parallelism] may be missing.  Keys are the fields of `Cluster`, `Model` and
`Parallelism`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from libra.cost.fields import check_keys, find_preset, from_keys, read_described
from libra.cost.hardware import CLUSTERS, Cluster
from libra.cost.models import MODELS, Model
from libra.cost.parallelism import Parallelism

_SECTIONS: Final[dict[str, tuple[type, Any]]] = {
    "cluster": (Cluster, CLUSTERS),
    "model": (Model, MODELS),
    "parallelism": (Parallelism, None),
}
"""What each section describes, and the presets that it can start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Contents of a description file; None for a section that it lacks."""

    cluster: Cluster
    model: Model | None = None
    parallelism: Parallelism | None = None


def describe(cluster: str) -> Description:
    """What `--cluster` names: a preset, or a description file.

    ValueError names the file, the section and the key: for a key that is unknown (with the nearest
    known key), missing, of the wrong type or out of range.
    """
    # A preset's name wins over a file of the same name; everything else that exists is a file.
    path = Path(cluster)
    if cluster.lower() not in CLUSTERS and (path.suffix == ".toml" or path.exists()):
        return read_described(path, _description)
    return Description(cluster=find_preset("cluster", cluster, CLUSTERS))


def _description(sections: Mapping[str, Any]) -> Description:
    check_keys(sections, _SECTIONS, "the file, outside any section")
    found: dict[str, Any] = {}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"{name} is {section!r}; it must be a section, [{name}]")
        kind, presets = _SECTIONS[name]
        found[name] = from_keys(kind, section, f"[{name}]", presets=presets)
    if "cluster" not in found:
        raise ValueError("there is no [cluster] section; add one, or name a preset")
    return Description(**found)
