"""Figures as people read them."""

from __future__ import annotations

from typing import NamedTuple


class ByteUnit(NamedTuple):
    """A power of 1000 bytes, its name, and the decimals that are worth showing."""

    name: str
    bytes: float
    decimals: int

    def show(self, count: float) -> str:
        """`count` bytes in this unit; nothing at all is a bare 0."""
        return f"{count / self.bytes:,.{self.decimals}f}" if count else "0"


def byte_unit(most: float) -> ByteUnit:
    """The unit in which bytes up to `most` read best, for a whole column or table."""
    # For example up to 354.2e9 bytes: GB, with one decimal.
    name, size = "B", 1.0
    for larger in ("kB", "MB", "GB"):
        if most < 1000 * size:
            break
        name, size = larger, 1000 * size
    # Four figures at most: 41.56 GB, 354.2 GB, but no fractions of a byte.
    figures_before_point = len(f"{most / size:.0f}")
    decimals = 0 if name == "B" else min(2, 4 - figures_before_point)
    return ByteUnit(name, size, decimals)


def show_bytes(count: float) -> str:
    """`count` bytes in the unit that fits them."""
    unit = byte_unit(count)
    return f"{unit.show(count)} {unit.name}"


def show_seconds(seconds: float) -> str:
    """A duration in s, ms or µs, three figures."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    for name, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {name}"
    return f"{seconds / 1e-6:.3g} µs"
