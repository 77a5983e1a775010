"""Numbers as the report prints them: few digits, and a unit."""

from __future__ import annotations


def count(value: float) -> str:
    """1234567 as 1,234,567."""
    return f"{value:,.0f}"


def three_digits(value: float) -> str:
    """Three significant digits, trailing zeros included, so that numbers in a column line up."""
    if value == 0:
        return "0"
    return f"{value:#.3g}" if 1e-4 <= abs(value) < 99.95 else f"{value:,.0f}"


def short(value: float) -> str:
    """1234567 as 1.23M."""
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{name}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share of one as a percentage; small shares keep one significant digit."""
    size = abs(100 * share)
    if size < 1e-4:
        return "0%"
    if size >= 99.5:
        return f"{100 * share:,.0f}%"
    return f"{100 * share:.1f}%" if size >= 0.95 else f"{100 * share:.1g}%"


def seconds(value: float) -> str:
    """A duration in s, ms or µs."""
    for scale, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= scale or value == 0:
            return f"{three_digits(value / scale)} {name}"
    return f"{three_digits(value / 1e-6)} µs"


def gigabytes(value: float) -> str:
    """A number of GB with its unit."""
    return f"{three_digits(value)} GB"


def times(ratio: float) -> str:
    """A ratio as a factor, such as 1.52×."""
    return f"{ratio:.2f}×"
