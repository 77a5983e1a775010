"""From values to pixels, and where an axis is marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from libra.simulate.report.chart import Scale
from libra.simulate.report.reading import Number

MOST_DECADES = 6.0
"""Of a logarithmic axis; what lies further below the largest value is not told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Values `low .. high` along pixels `start .. end` (`end` may lie before `start`)."""

    scale: Scale
    low: float
    high: float
    start: float
    end: float

    def at(self, value: Number) -> Number:
        """Pixel of a value; None where it has none: missing, or not positive on a log axis."""
        if value is None:
            return None
        if self.scale == "log":
            if value <= 0:
                return None
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def span_of(
    values: Sequence[float],
    *,
    scale: Scale,
    start: float,
    end: float,
    low: Number = None,
    high: Number = None,
    tight: bool = False,
) -> Span:
    """An axis for `values`.  Linear ones start at 0 unless `tight`; log ones at a round number.

    Given ends hold where the scale can show them; an axis is never empty.
    """
    if scale == "log":
        positive = [value for value in values if value > 0] or [1.0]
        top = high if high is not None and high > 0 else max(positive)
        bottom = max(min(positive), top / 10**MOST_DECADES)
        if low is not None and low > 0:
            bottom = low
        elif not tight:
            bottom = _round_down(bottom)
        if bottom >= top:
            bottom, top = top / 2, top * 2
        return Span(scale=scale, low=bottom, high=top, start=start, end=end)
    values = list(values) or [0.0]
    bottom = low if low is not None else (min(values) if tight else min(0.0, *values, 0.0))
    top = high if high is not None else max(values)
    if bottom >= top:
        bottom, top = (bottom - 1, bottom + 1) if tight else (bottom, bottom + 1)
    return Span(scale=scale, low=bottom, high=top, start=start, end=end)


def round_ticks(span: Span, most: int) -> list[float]:
    """At most about `most` round numbers inside the span."""
    return _log_ticks(span, most) if span.scale == "log" else _linear_ticks(span, most)


def _linear_ticks(span: Span, most: int) -> list[float]:
    raw = (span.high - span.low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(span.low / step - 1e-9)
    last = math.floor(span.high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(span: Span, most: int) -> list[float]:
    low, high = math.log10(span.low), math.log10(span.high)
    decades = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        inside = [tick for tick in ticks if span.low * 0.999 <= tick <= span.high * 1.001]
        if len(inside) <= most:
            break
    else:
        inside = inside[:: -(-len(inside) // most)]
    return inside if len(inside) >= 2 else [span.low, span.high]


def _round_down(value: float) -> float:
    """The largest 1, 2 or 5 times a power of ten that is not above."""
    power = 10.0 ** math.floor(math.log10(value))
    return max(factor * power for factor in (0.5, 1, 2, 5) if factor * power <= value * 1.0001)
