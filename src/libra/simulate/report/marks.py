"""SVG elements and path strings, short ones: a report holds thousands of points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from libra.simulate.report.looks import Mark
from libra.simulate.report.reading import Number

Point = tuple[Number, Number]


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """One element; `content` is markup.  `class_` is `class`, other underscores are hyphens."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def text(words: str, x: float, y: float, **attributes: object) -> str:
    return tag("text", escape(words), x=at(x), y=at(y), **attributes)


def at(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    shown = f"{value:.1f}"
    shown = shown.removesuffix(".0")
    return "0" if shown == "-0" else shown


def line_path(points: Iterable[Point]) -> str:
    """A line through the points, broken where one is missing."""
    path, down = [], False
    for x, y in points:
        if x is None or y is None:
            down = False
            continue
        path.append(f"{'L' if down else 'M'}{at(x)} {at(y)}")
        down = True
    return "".join(path)


def area_path(points: Sequence[Point], base: float) -> str:
    """The area between the line and the horizontal at `base`, one piece a run without gaps."""
    return "".join(
        f"M{at(run[0][0])} {at(base)}"
        + "".join(f"L{at(x)} {at(y)}" for x, y in run)
        + f"V{at(base)}Z"
        for run in runs(points)
    )


def runs(points: Iterable[Point]) -> list[list[tuple[float, float]]]:
    """Stretches of points that are there."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if x is None or y is None:
            found.append([])
        else:
            found[-1].append((x, y))
    return [run for run in found if run]


def step_points(edges: Sequence[Number], heights: Sequence[Number]) -> list[Point]:
    """Corners of an outline over bins."""
    return [
        point
        for left, right, height in zip(edges, edges[1:], heights, strict=False)
        for point in ((left, height), (right, height))
    ]


def bars_path(
    edges: Sequence[Number], heights: Sequence[Number], base: float, *, share: float
) -> str:
    """Bars that fill `share` of each bin's width."""
    path = []
    for left, right, top in zip(edges, edges[1:], heights, strict=False):
        if left is None or right is None or top is None:
            continue
        width = (right - left) * share
        path.append(
            f"M{at((left + right - width) / 2)} {at(base)}V{at(top)}h{at(width)}V{at(base)}Z"
        )
    return "".join(path)


def mark_path(mark: Mark, points: Iterable[Point], size: float) -> str:
    """All marks of a series as one path; `size` is about the radius in pixels."""
    return "".join(_mark(mark, x, y, size) for x, y in points if x is not None and y is not None)


def _mark(mark: Mark, x: float, y: float, r: float) -> str:
    if mark == "none":
        return ""
    if mark == "circle":
        half = f"a{at(r)} {at(r)} 0 1 0"
        return f"M{at(x - r)} {at(y)}{half} {at(2 * r)} 0{half} {at(-2 * r)} 0Z"
    corners = [(x + r * dx, y + r * dy) for dx, dy in _CORNERS[mark]]
    return "M" + "L".join(f"{at(px)} {at(py)}" for px, py in corners) + "Z"


_T = 0.38
_PLUS = (
    (-_T, -1.25), (_T, -1.25), (_T, -_T), (1.25, -_T), (1.25, _T), (_T, _T),
    (_T, 1.25), (-_T, 1.25), (-_T, _T), (-1.25, _T), (-1.25, -_T), (-_T, -_T),
)  # fmt: skip
_CORNERS: dict[Mark, tuple[tuple[float, float], ...]] = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    "triangle": ((0, -1.2), (1.2, 0.9), (-1.2, 0.9)),
    "down": ((0, 1.2), (1.2, -0.9), (-1.2, -0.9)),
    "plus": _PLUS,
    "cross": tuple((0.75 * (x - y), 0.75 * (x + y)) for x, y in _PLUS),
}
