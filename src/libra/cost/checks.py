"""What the figures of a description may be: ValueErrors that name the field and the value seen."""

from __future__ import annotations

from libra.config import is_finite
from libra.data.lengths import check_count

__all__ = ["check_choice", "check_count", "check_name", "check_positive", "check_share"]


def check_positive(name: str, value: object, *, zero: bool = False) -> float:
    """`value`; ValueError unless it is finite and above 0, or at least 0 where `zero` allows."""
    least = ">= 0" if zero else "> 0"
    if not is_finite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} is {value!r}; it must be a finite number {least}")
    return value


def check_share(name: str, value: object, *, zero: bool = False) -> None:
    """ValueError unless `value` is in (0, 1], or in [0, 1] where `zero` allows."""
    if check_positive(name, value, zero=zero) > 1:
        raise ValueError(f"{name} is {value!r}; it is a share and must be at most 1")


def check_name(name: str, value: object) -> None:
    """ValueError unless `value` is text, and not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}; it must be text")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")
