"""How fast attention runs, by the shape of its segments.

A segment is q_len query rows against k_len >= q_len keys, and its last row sees all of them: it has
exactly q_len * k_len - q_len (q_len - 1) / 2 query-key pairs a head.  A pair costs 2 (key dim +
value dim) operations forward and 2.5 times that backward, as the FlashAttention papers count.  The
table holds the fraction of a peak rate that each shape reaches, and so

    seconds = operations / (peak * fraction)

Fractions are given at grid points of (q_len, k_len / q_len, heads).  Between them the logarithm of
the fraction is linear in the logarithm of each axis; beyond the grid it keeps its value at the
edge.

Simplifications.  A fraction describes a segment in a call with enough segments and heads to fill
the GPU.  The seconds of a call are then the sum of its segments' seconds; the share of a GPU that
a smaller call leaves idle is not modelled.  The fixed time of a kernel call is `call_seconds`, and
is not part of `seconds`.

`libra calibrate` writes tables into files, JSON or TOML by the file's ending.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import check_choice, check_fields, check_number
from libra.cost.arrays import Floats, check_array
from libra.cost.fields import from_keys, read_described
from libra.data.lengths import causal_pairs

Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, Direction]] = ("forward", "backward")

FORMAT: Final = "libra-kernel-table"
VERSION: Final = 1
SUFFIXES: Final = (".json", ".toml")
_AXES: Final = {"q_len": np.int64, "k_per_q": np.float64, "heads": np.int64}

BACKWARD_OPERATIONS: Final = 2.5
"""Operations of a backward pass over those of its forward: five products in place of two."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTable:
    """Fractions of a peak rate by segment shape; immutable, checked when made."""

    source: str
    """Origin of the figures."""

    peak_flops: float
    """FLOP/s that the fractions are of."""

    key_dim: int
    """Elements of a key head, as measured."""

    value_dim: int
    """Elements of a value head."""

    q_len: NDArray[np.int64]
    """Grid of query rows, ascending, [Q]."""

    k_per_q: Floats
    """Grid of k_len / q_len, ascending from 1, [K]."""

    heads: NDArray[np.int64]
    """Grid of query heads, ascending, [H]."""

    forward: Floats
    """Fractions > 0, [Q, K, H]."""

    backward: Floats
    """Fractions > 0, [Q, K, H]."""

    call_seconds: float = 0.0
    """Fixed seconds of a forward call, whatever it computes; no part of `seconds`."""

    matmul_flops: float | None = None
    """FLOP/s of a large matrix product on the same machine, where it was measured."""

    def __post_init__(self) -> None:
        check_fields(self, zero=("call_seconds",))
        if self.matmul_flops is not None:
            check_number("KernelTable.matmul_flops", self.matmul_flops)
        arrays = {name: _check_axis(name, getattr(self, name)) for name in _AXES}
        shape = tuple(map(len, arrays.values()))
        check = partial(check_array, shape=shape, shape_from="q_len, k_per_q and heads", zero=False)
        for direction in DIRECTIONS:
            fractions = getattr(self, direction)
            arrays[direction] = check(f"KernelTable.{direction}", fractions)
        # These are copies, so that nobody who holds the originals can change the table.
        for name, array in arrays.items():
            kept = array.astype(_AXES.get(name, np.float64), copy=False)
            kept.setflags(write=False)
            object.__setattr__(self, name, kept)

    def fraction(
        self, q_len: ArrayLike, k_len: ArrayLike, heads: ArrayLike, *, direction: Direction
    ) -> Floats:
        """Fraction of the peak that such segments reach; broadcasts.  Raises ValueError."""
        check_choice("direction", direction, DIRECTIONS)
        q, k, h = _check_segments(q_len, k_len, heads)
        # Rates follow power laws of the shape, so straight lines between logarithms fit them.
        logarithms = _interpolate(
            (np.log(self.q_len), np.log(self.k_per_q), np.log(self.heads)),
            np.log(getattr(self, direction)),
            (np.log(q), np.log(k / q), np.log(h)),
        )
        return np.asarray(np.exp(logarithms))

    def seconds(
        self, q_len: ArrayLike, k_len: ArrayLike, heads: ArrayLike, *, direction: Direction
    ) -> Floats:
        """Seconds of each segment, float64; the arguments broadcast.

        `q_len` >= 1 rows, `k_len` >= `q_len` keys, `heads` >= 1 query heads.  Raises ValueError for
        anything else and for a `direction` other than "forward" and "backward".
        """
        fraction = self.fraction(q_len, k_len, heads, direction=direction)
        operations = segment_flops(
            q_len, k_len, heads, self.key_dim, self.value_dim, direction=direction
        )
        return np.asarray(operations / (self.peak_flops * fraction))


def segment_flops(
    q_len: ArrayLike,
    k_len: ArrayLike,
    heads: ArrayLike,
    key_dim: int,
    value_dim: int,
    *,
    direction: Direction,
) -> Floats:
    """Operations of each causal segment, float64; broadcasts."""
    q, k = np.asarray(q_len, dtype=np.int64), np.asarray(k_len, dtype=np.int64)
    # The segment is the last q rows of a causal square of k rows: rows k - q to k.
    pairs = causal_pairs(k - q, k).astype(np.float64) * np.asarray(heads, dtype=np.float64)
    times = BACKWARD_OPERATIONS if direction == "backward" else 1.0
    return np.asarray(pairs * (2 * (key_dim + value_dim) * times))


def _interpolate(
    grids: tuple[Floats, Floats, Floats], values: Floats, points: tuple[Floats, Floats, Floats]
) -> Floats:
    """`values` [Q, K, H] at `points` (q, k / q, heads) between grid points, as at the edge beyond
    them; the points broadcast.

    For example, on an axis with grid [0, 2, 6] the point 3 is a quarter of the way from index 1 to
    index 2: three quarters of the value are that of index 1, one quarter is that of index 2.
    """
    # With grids of 2 x 2 x 2 points and a point half way on every axis, each of the 8 corners has
    # the weight 1/8; a point on a grid point has one corner of weight 1.
    # Step 1: on each axis, the grid points on both sides and the share of the way between them.
    axes = []
    for grid, at in zip(grids, points, strict=True):
        last = len(grid) - 1
        low = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, last)
        high = np.minimum(low + 1, last)
        width = np.where(high > low, grid[high] - grid[low], 1.0)
        share = np.where(high > low, np.maximum(at - grid[low], 0.0) / width, 0.0)
        corners = [(low, 1 - share)]
        if last:  # an axis of one grid point has no second corner
            corners.append((high, share))
        axes.append(corners)

    # Step 2: the mean of the (at most) eight corners around a point.
    total = np.zeros(np.broadcast_shapes(*(np.shape(at) for at in points)))
    for (i, u), (j, v), (m, w) in product(*axes):
        total += u * v * w * values[i, j, m]
    return total


def _check_segments(
    q_len: ArrayLike, k_len: ArrayLike, heads: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    # Checked here and not only in the plan: `libra calibrate` and users call this directly.
    arrays = []
    for name, values in (("q_len", q_len), ("k_len", k_len), ("heads", heads)):
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":  # an empty list reads as floats
            raise ValueError(f"{name} has dtype {array.dtype}; it must be integers")
        if array.size and array.min() < 1:
            raise ValueError(f"{name} holds {array.min()}; it must be >= 1")
        arrays.append(array.astype(np.int64))
    q, k, h = arrays
    if np.any(k < q):
        raise ValueError("k_len is less than q_len: every query row has a key of its own")
    return q, k, h


def _check_axis(name: str, values: ArrayLike) -> Floats:
    array = check_array(f"KernelTable.{name}", values)
    if array.ndim != 1 or not len(array) or array[0] < 1 or (np.diff(array) <= 0).any():
        raise ValueError(
            f"KernelTable.{name} is {array.tolist()}; it must be ascending numbers from 1 on"
        )
    if name != "k_per_q" and (array != np.floor(array)).any():
        raise ValueError(f"KernelTable.{name} is {array.tolist()}; it must be integers")
    if name == "k_per_q" and array[0] != 1:
        raise ValueError(f"KernelTable.k_per_q starts at {array[0]}; it must start at 1")
    return array


def check_suffix(path: Path) -> None:
    """ValueError for a file that is neither .json nor .toml."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}; a kernel table is a .json or .toml file")


def write_kernel_table(table: KernelTable, path: Path) -> None:
    """Write `table`; the same table gives the same bytes.  Raises ValueError and OSError."""
    check_suffix(path)
    values = {"format": FORMAT, "version": VERSION, **asdict(table)}
    # A line a key.  These values are spelled alike in JSON and TOML, which has no null.
    lines = {
        name: json.dumps(value, ensure_ascii=False, default=np.ndarray.tolist)
        for name, value in values.items()
        if value is not None
    }
    if path.suffix == ".json":
        text = "{\n" + ",\n".join(f'  "{name}": {line}' for name, line in lines.items()) + "\n}\n"
    else:
        text = "".join(f"{name} = {line}\n" for name, line in lines.items())
    path.write_text(text, encoding="utf-8")


def read_kernel_table(path: Path) -> KernelTable:
    """Read a table.  ValueError names the file and what is wrong in it."""
    check_suffix(path)
    return read_described(path, _table, "kernel table ")


def _table(values: object) -> KernelTable:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"not a kernel table: it has no format = {FORMAT!r}")
    # A newer version may change the meaning of a field, so nothing is guessed.
    if values.get("version") != VERSION:
        raise ValueError(
            f"a kernel table of version {values.get('version')!r}; this libra reads version "
            f"{VERSION}: run `libra calibrate` again"
        )
    given = {name: value for name, value in values.items() if name not in ("format", "version")}
    return from_keys(KernelTable, given, "the kernel table")
