"""How each kind of series looks, on paper, on a screen by day and by night.

Hues start from Okabe and Ito's palette, darkened (or lightened at night) until each stands out from
the page by 3:1 or more.  Whatever colour says, a mark, a dash or a hatch says too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Mark = Literal["circle", "square", "diamond", "triangle", "down", "cross", "plus", "none"]


class Look(NamedTuple):
    day: str
    night: str
    mark: Mark
    dash: tuple[int, ...] = ()
    width: float = 2.0


_ORANGE = ("#C2540A", "#F59B4B")
_BLUE = ("#0B5FA5", "#64B5F6")
_GREEN = ("#0A7A5C", "#4CCBA4")
_PINK = ("#A8458A", "#E493C8")
_SKY = ("#3A8FC7", "#9AD0F5")
_OLIVE = ("#7D6C00", "#D9C545")
_GREY = ("#6A6A6A", "#A8A8A8")
_INK = ("#222222", "#EDEDED")

LOOKS: dict[str, Look] = {
    # schemes
    "ulysses": Look(*_ORANGE, "square"),
    "wlb": Look(*_PINK, "triangle", (7, 3)),
    "cluster": Look(*_GREEN, "diamond", (10, 3, 2, 3)),
    "tap": Look(*_SKY, "down", (5, 3)),
    "tap_vrsp": Look(*_OLIVE, "plus", (4, 2)),
    "libra": Look(*_BLUE, "circle", (), 3.0),
    "ideal": Look(*_GREY, "none", (2, 3)),
    # before and after
    "before": Look(*_ORANGE, "square"),
    "random": Look(*_PINK, "triangle", (7, 3)),
    "theory": Look(*_INK, "none", (6, 4), 1.5),
    "greedy": Look(*_SKY, "diamond", (5, 3)),
    "after": Look(*_BLUE, "circle", (), 3.0),
    "bound": Look(*_GREY, "none", (2, 3)),
    # the corpus
    "samples": Look(*_GREEN, "none", (2, 2)),
    "tokens": Look(*_ORANGE, "none", (7, 3)),
    "cost": Look(*_BLUE, "none", (), 2.5),
    "mean": Look(*_INK, "none", (), 1.2),
    # parts of a step
    "attention": Look(*_BLUE, "none"),
    "exposed": Look(*_ORANGE, "none"),
    "other": Look("#B9C2CC", "#5A6672", "none"),
}

_POOLS: tuple[tuple[tuple[str, str], Mark], ...] = (
    (_ORANGE, "square"),
    (_GREEN, "diamond"),
    (_BLUE, "circle"),
    (_PINK, "triangle"),
    (_OLIVE, "down"),
    (_SKY, "cross"),
    (_GREY, "plus"),
)
LOOKS.update({f"group{i}": Look(*hue, mark) for i, (hue, mark) in enumerate(_POOLS)})
GROUPS = len(_POOLS)
"""Looks for the pool sizes of a trade-off; more of them take turns."""

PLAIN = Look(*_GREY, "circle")


def look_of(key: str) -> Look:
    """A grey one for a key that nobody thought of."""
    return LOOKS.get(key, PLAIN)


def group_look(index: int) -> str:
    return f"group{index % GROUPS}"
