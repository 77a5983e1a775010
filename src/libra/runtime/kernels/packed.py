"""An attention call as FlashAttention builds take it: packed rows and cumulative lengths.

    segments      q rows | k rows            packed     cu_q  0    2       5      7
       A          A A    | a a a                        q     A A | B B B | C C
       B          B B B  | a a a a a                    k     a a a | a a a a a | c c
       C          C C    | c c                          cu_k  0     3           8   10

Each segment gets a copy of its keys, because cumulative lengths cannot describe ranges that
overlap.  Many blocks of one sample read the same prefix, so the copies could multiply memory.  An
attention call is therefore cut into several packed calls.  Each gathers at most `duplication` times
as many key rows as the largest set of segments that share no key.

dK and dV are added one such set after the other, in an order fixed when the call is prepared.  No
two additions race, so a run repeats itself bit for bit if the build's own backward does.

Shape legend: T rows of a buffer, N its heads, R packed rows, D elements of a head, U head units.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
import torch

from libra.data.lengths import IntArray
from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.interface import Prepared, check_call

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows:
    """Rows and heads of a buffer in packed order; no pair of row and head occurs twice.

      buffer [T, N, D]                    packed [R, heads, D]
      .  .  .  .  .                       a a
      .  a  a  .  .   row 1, head 1       b b
      .  .  .  .  .                 <->   c c
      b  b  .  .  .   row 3, head 0
      c  c  .  .  .   row 4, head 0

    The cheapest of three forms is used: one slice; any rows of one head range; any rows and heads.
    No form waits for the device.
    """

    count: int
    heads: int
    head: int | None
    """First head, where all rows share it."""
    start: int | None
    """First row, where rows and heads form one slice of the buffer."""
    rows: Tensor
    """int64 [R]."""
    units: Tensor | None
    """int64 [R, U], where first heads differ: a unit is `unit` neighbouring heads."""
    unit: int
    unit_heads: int
    """Heads of the buffer that units address: a multiple of `unit`."""

    def gather(self, buffer_TND: Tensor) -> Tensor:
        """Packed [R, heads, D]: a view if the rows form a slice, else a copy."""
        if self.units is not None:
            packed: Tensor = self._split(buffer_TND)[self.rows[:, None], self.units]
            return packed.flatten(1, 2)
        view_TND = self._narrow(buffer_TND)
        return view_TND if self.start is not None else view_TND.index_select(0, self.rows)

    def scatter(self, buffer_TND: Tensor, packed_RND: Tensor) -> None:
        """Write packed rows to their rows of the buffer."""
        if self.units is not None:
            split = self._split(buffer_TND)
            split[self.rows[:, None], self.units] = packed_RND.unflatten(1, (-1, self.unit))
        elif self.start is not None:
            self._narrow(buffer_TND).copy_(packed_RND)
        else:
            self._narrow(buffer_TND).index_copy_(0, self.rows, packed_RND)

    def scatter_add(self, buffer_TND: Tensor, packed_RND: Tensor) -> None:
        """Add packed rows in the buffer's dtype, each element once, so that results repeat."""
        if self.units is not None:
            at = (self.rows[:, None], self.units)
            split = self._split(buffer_TND)
            split[at] = split[at].add_(packed_RND.unflatten(1, (-1, self.unit)))
        elif self.start is not None:
            self._narrow(buffer_TND).add_(packed_RND)
        else:
            packed_RND = packed_RND.to(buffer_TND.dtype)
            self._narrow(buffer_TND).index_add_(0, self.rows, packed_RND)

    def _narrow(self, buffer_TND: Tensor) -> Tensor:
        assert self.head is not None
        view_TND = buffer_TND.narrow(1, self.head, self.heads)
        return view_TND if self.start is None else view_TND.narrow(0, self.start, self.count)

    def _split(self, buffer_TND: Tensor) -> Tensor:
        units: Tensor = buffer_TND.narrow(1, 0, self.unit_heads).unflatten(1, (-1, self.unit))
        return units


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedCall:
    """One call of a FlashAttention build: R packed query rows of N heads, K packed key rows."""

    q: Rows
    k: Rows
    k_sets: tuple[Rows, ...]
    """The packed keys set by set; within a set no key occurs twice."""
    cu_q: Tensor
    """int32 [segments + 1]: packed query rows before each segment."""
    cu_k: Tensor
    max_q: int
    max_k: int
    lse_index: Tensor
    """int64 [N * R]: the element of the flat LSE that holds (head, packed row)."""
    causal: bool
    """Bottom-right; False: every query row of a segment sees all its keys."""


def pack(call: AttentionCall, device: torch.device, duplication: int) -> Prepared[PackedCall]:
    """The packed calls of `call`, their index tensors on `device`.

    Raises ValueError for segments that no causal kernel could take.
    """
    extents = check_call(call)
    batches = _batches(call, key_sets(call), duplication)
    return Prepared(tuple(_pack_sets(call, sets, device) for sets in batches), extents)


def key_sets(call: AttentionCall) -> list[IntArray]:
    """Segment indices in sets, so that the segments of one set share no key of any head.

    This is interval colouring, head range by head range, greedy in order of the first key.  It
    makes as many sets as the most shared key has readers, the fewest possible.  For keys [0, 4),
    [2, 6) and [4, 8) of one head the sets are {0, 2} and {1}.
    """
    head_group = call.kv_head
    if (np.diff(np.unique(head_group)) < call.kv_heads).any():
        # Head ranges overlap in part, so segments with common rows may share keys.
        head_group = np.zeros_like(head_group)
    stop = (call.k_start + call.k_len).tolist()
    colour = np.zeros(len(call), dtype=np.int64)
    busy: list[tuple[int, int]] = []  # (row from which a colour is free again, colour)
    free: list[int] = []
    colours, current = 0, -1
    # A heap of busy colours tells which are free again, a heap of free ones the smallest.
    for index in np.lexsort((call.k_start, head_group)).tolist():
        if head_group[index] != current:
            busy, free, colours, current = [], [], 0, int(head_group[index])
        while busy and busy[0][0] <= call.k_start[index]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free, colours = [colours], colours + 1
        colour[index] = heapq.heappop(free)
        heapq.heappush(busy, (stop[index], int(colour[index])))
    return [np.flatnonzero(colour == c) for c in np.unique(colour)]


def _batches(call: AttentionCall, sets: list[IntArray], duplication: int) -> list[list[IntArray]]:
    """Key sets in their order, as many to a batch as `duplication` allows."""
    sizes = [int(call.k_len[members].sum()) for members in sets]
    batches: list[list[IntArray]] = []
    most, left = duplication * max(sizes, default=0), 0
    for members, size in zip(sets, sizes, strict=True):
        if size > left:
            batches.append([])
            left = most
        batches[-1].append(members)
        left -= size
    return batches


def _pack_sets(call: AttentionCall, sets: list[IntArray], device: torch.device) -> PackedCall:
    members = np.concatenate(sets)
    q_len, k_len = call.q_len[members], call.k_len[members]
    set_rows = [key_rows(call, part, device) for part in sets]
    return PackedCall(
        q=query_rows(call, members, device),
        k=set_rows[0] if len(sets) == 1 else key_rows(call, members, device),
        k_sets=tuple(set_rows),
        cu_q=_offsets(q_len, device),
        cu_k=_offsets(k_len, device),
        max_q=int(q_len.max()),
        max_k=int(k_len.max()),
        lse_index=lse_index(call, members, device),
        causal=call.causal,
    )


def query_rows(call: AttentionCall, members: IntArray, device: torch.device) -> Rows:
    """Query rows of some of a call's segments, one segment after another."""
    head = call.q_head[members]
    return _make_rows(call.q_start[members], call.q_len[members], head, call.heads, device)


def key_rows(call: AttentionCall, members: IntArray, device: torch.device) -> Rows:
    """Key rows of some of a call's segments, one segment after another."""
    head = call.kv_head[members]
    return _make_rows(call.k_start[members], call.k_len[members], head, call.kv_heads, device)


def _make_rows(
    start: IntArray, length: IntArray, head: IntArray, heads: int, device: torch.device
) -> Rows:
    """Rows of the ranges [start, start + length) from `head` on, packed one after another.

    `start`, `length` and `head` are int64 [ranges].
    """
    one_head = bool((head == head[0]).all())
    consecutive = one_head and bool((start[1:] == start[:-1] + length[:-1]).all())
    # Step 1: rows.  Ranges [5, 7) and [1, 4): packed starts are 0 and 2, shifts 5 and -1, rows
    # 5 6 | 1 2 3.
    shift = np.repeat(start - (np.cumsum(length) - length), length)
    unit = math.gcd(heads, *head.tolist())
    units = None
    if not one_head:
        # Step 2: heads.  Heads 2 and 6, four heads each: units of two heads, 1 2 for the first
        # and 3 4 for the second.
        unit_of_range = head[:, None] // unit + np.arange(heads // unit)
        units = torch.from_numpy(np.repeat(unit_of_range, length, axis=0)).to(device)
    return Rows(
        count=len(shift),
        heads=heads,
        head=int(head[0]) if one_head else None,
        start=int(start[0]) if consecutive else None,
        rows=torch.from_numpy(shift + np.arange(len(shift))).to(device),
        units=units,
        unit=unit,
        unit_heads=int(head.max()) + heads,
    )


def _offsets(length: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(length)).astype(np.int32)).to(device)


def lse_index(call: AttentionCall, members: IntArray, device: torch.device) -> Tensor:
    """Elements of the flat LSE of a call in the order in which a build returns those of `members`.

    The flat LSE is ordered by segment, head and row; a build's by head, segment and row.
    """
    # Segments of 2 and 3 rows, two heads.  The flat LSE has 0 1 | 2 3 for the first segment and
    # 4 5 6 | 7 8 9 for the second; a build returns 0 1 4 5 6 for head 0 and 2 3 7 8 9 for head 1.
    start = ((np.cumsum(call.q_len) - call.q_len) * call.heads)[members]
    q_len = call.q_len[members]
    row = np.arange(int(q_len.sum())) - np.repeat(np.cumsum(q_len) - q_len, q_len)
    first = torch.from_numpy(np.repeat(start, q_len) + row).to(device)
    stride = torch.from_numpy(np.repeat(q_len, q_len)).to(device)
    head = torch.arange(call.heads, device=device)
    return (first + stride * head[:, None]).flatten()
