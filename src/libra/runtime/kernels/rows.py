"""Where the rows of a packed kernel call lie in a buffer; they come and go without a host sync.

      buffer [T, N, D]                    packed [R, heads, D]
      .  .  .  .  .                       a a
      .  a  a  .  .   row 1, head 1       b b
      .  .  .  .  .                 <->   c c
      b  b  .  .  .   row 3, head 0
      c  c  .  .  .   row 4, head 0

Shape legend: T rows of a buffer, N its heads, R packed rows, D elements of a head, U head units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows:
    """Rows and heads of a buffer in packed order; no row and head occurs twice.

    The plainest of three forms is kept: one slice; any rows of one head range; any rows and heads.
    """

    count: int
    heads: int
    head: int | None
    """First head, where all rows share it."""
    start: int | None
    """First row, where rows and heads form one slice of the buffer."""
    rows: torch.Tensor
    """int64 [R]."""
    units: torch.Tensor | None
    """int64 [R, U], where first heads differ: a unit is `unit` neighbouring heads."""
    unit: int
    reach: int
    """Heads of the buffer that units address: a multiple of `unit`."""

    def take(self, buffer_TND: torch.Tensor) -> torch.Tensor:
        """Packed [R, heads, D]: a view if the rows form a slice, else a copy."""
        if self.units is not None:
            packed: torch.Tensor = self._split(buffer_TND)[self.rows[:, None], self.units]
            return packed.flatten(1, 2)
        view_TND = self._narrow(buffer_TND)
        return view_TND if self.start is not None else view_TND.index_select(0, self.rows)

    def put(self, buffer_TND: torch.Tensor, packed_RND: torch.Tensor) -> None:
        """Write packed rows back to where they lie."""
        if self.units is not None:
            split = self._split(buffer_TND)
            split[self.rows[:, None], self.units] = packed_RND.unflatten(1, (-1, self.unit))
        elif self.start is not None:
            self._narrow(buffer_TND).copy_(packed_RND)
        else:
            self._narrow(buffer_TND).index_copy_(0, self.rows, packed_RND)

    def add(self, buffer_TND: torch.Tensor, packed_RND: torch.Tensor) -> None:
        """Add packed rows in the buffer's dtype, once per element: the result repeats itself."""
        if self.units is not None:
            at = (self.rows[:, None], self.units)
            split = self._split(buffer_TND)
            split[at] = split[at].add_(packed_RND.unflatten(1, (-1, self.unit)))
        elif self.start is not None:
            self._narrow(buffer_TND).add_(packed_RND)
        else:
            packed_RND = packed_RND.to(buffer_TND.dtype)
            self._narrow(buffer_TND).index_add_(0, self.rows, packed_RND)

    def _narrow(self, buffer_TND: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        view_TND = buffer_TND.narrow(1, self.head, self.heads)
        return view_TND if self.start is None else view_TND.narrow(0, self.start, self.count)

    def _split(self, buffer_TND: torch.Tensor) -> torch.Tensor:
        units: torch.Tensor = buffer_TND.narrow(1, 0, self.reach).unflatten(1, (-1, self.unit))
        return units


def make_rows(
    start: IntArray, length: IntArray, head: IntArray, heads: int, device: torch.device
) -> Rows:
    """Rows of ranges [start, start + length) at `head`, one behind the other; int64 [ranges]."""
    one_head = bool((head == head[0]).all())
    consecutive = one_head and bool((start[1:] == start[:-1] + length[:-1]).all())
    count = int(length.sum())
    first = np.repeat(start - (np.cumsum(length) - length), length)
    unit = math.gcd(heads, *head.tolist())
    units = None
    if not one_head:
        unit_of_range = head[:, None] // unit + np.arange(heads // unit)
        units = _upload(np.repeat(unit_of_range, length, axis=0), device)
    return Rows(
        count=count,
        heads=heads,
        head=int(head[0]) if one_head else None,
        start=int(start[0]) if consecutive else None,
        rows=_upload(first + np.arange(count), device),
        units=units,
        unit=unit,
        reach=int(head.max()) + heads,
    )


def _upload(array: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
