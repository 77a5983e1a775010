"""Reading a simulation's JSON without tripping: what is missing, null, NaN or odd becomes None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Number = float | None

LARGEST = 1e30


def record(value: object) -> Record:
    """`value` where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def records(value: object) -> list[Record]:
    """The mappings of a list; empty where it is none."""
    return [item for item in items(value) if isinstance(item, Mapping)]


def items(value: object) -> list[Any]:
    """`value` as a list where it is a sequence (or array) other than text, else empty."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []


def number(value: object) -> Number:
    """A finite number, or None.  Booleans are no numbers, nor is what no simulation can mean:
    beyond `LARGEST`, where arithmetic on axes would overflow.  Next to nothing is 0.
    """
    if isinstance(value, bool) or value is None or isinstance(value, str | bytes):
        return None
    try:
        found = float(value)  # type: ignore[arg-type]  # numpy's numbers too
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(found) or abs(found) > LARGEST:
        return None
    return found if abs(found) >= 1 / LARGEST else 0.0


def numbers(value: object) -> list[Number]:
    return [number(item) for item in items(value)]


def known(values: Sequence[Number]) -> list[float]:
    """Those that are there."""
    return [value for value in values if value is not None]


def words(value: object, default: str = "") -> str:
    """Text as it is; numbers spelled; nothing for null."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return default
    return str(value)
