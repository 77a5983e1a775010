"""Numbers as people read them: few digits, a unit, a dash where there is none."""

from __future__ import annotations

from collections.abc import Callable

from libra.simulate.report.reading import Number

NONE = "–"
"""What stands where a figure is missing."""

_POWERS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def digits(value: float, most: int = 3) -> str:
    """About `most` significant digits, without exponents between 1e-4 and 1e6."""
    size = abs(value)
    if size >= 10 ** (most - 1):
        return f"{value:,.0f}"
    if 0 < size < 0.99e-4:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{most}g}"


def three(value: float) -> str:
    """Three significant digits, zeros too: numbers below each other line up."""
    if value == 0:
        return "0"
    return digits(value) if not 1e-4 <= abs(value) < 99.95 else f"{value:#.3g}"


def short(value: float) -> str:
    """1234567 as 1.23M."""
    for power, name in _POWERS:
        if abs(value) >= 0.9995 * power:
            return f"{value / power:.3g}{name}"
    return digits(value)


def count(value: float) -> str:
    return f"{value:,.0f}"


def tokens(value: float) -> str:
    """262144 as 256K, where a power of 1024 divides it; otherwise like `short`."""
    for power, name in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= power and value % power == 0:
            return f"{value / power:,.0f}{name}"
    return count(value) if value < 10_000 else short(value)


def percent(value: float) -> str:
    """A share of one as a percentage."""
    size = abs(100 * value)
    if size == 0 or size >= 99.5:
        return f"{100 * value:.0f}%"
    return f"{100 * value:.1f}%" if size >= 0.95 else f"{100 * value:.1g}%"


def percent_tick(value: float) -> str:
    """A share of one at an axis."""
    return f"{digits(100 * value)}%"


def seconds(value: float) -> str:
    for limit, scale, name in ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms")):
        if abs(value) >= limit or (name == "s" and value == 0):
            return f"{three(value / scale)} {name}"
    return f"{three(value / 1e-6)} µs"


def times(value: float) -> str:
    return f"{value:.2f}×"


def shown(value: Number, spell: Callable[[float], str] = digits) -> str:
    """`spell` of what is there, a dash where nothing is."""
    return NONE if value is None else spell(value)
