"""AttentionCall as a FlashAttention build takes them: packed rows and cumulative lengths.

    segments      q rows | k rows            a call     cu_q  0    2       5      7
       A          A A    | a a a                        q     A A | B B B | C C
       B          B B B  | a a a a a                    k     a a a | a a a a a | c c
       C          C C    | c c                          cu_k  0     3           8   10

Each segment brings its own copy of its keys, since the offsets of these builds cannot overlap.
So that a sample whose blocks all read one prefix does not multiply memory, a launch is cut into
calls: a call gathers at most `duplication` times the rows of its largest set of segments that share
no key.  dK and dV are added one such set after the other, in an order made once: no two additions
race, and a run repeats itself bit for bit if the build's own backward does.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from libra.runtime.kernels.interface import AttentionCall, Extents, check_call
from libra.runtime.kernels.rows import Rows, make_rows

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call:
    """One call of the library: R packed query rows of N heads, K packed key rows."""

    q: Rows
    k: Rows
    k_sets: tuple[tuple[int, int, Rows], ...]
    """(first, last + 1, rows) of the packed keys, set by set; within a set no key occurs twice."""
    cu_q: torch.Tensor
    """int32 [segments + 1]: packed query rows before each segment."""
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    lse_at: torch.Tensor
    """int64 [N * R]: where element (head, packed row) lies in the flat LSE."""
    causal: bool
    """Bottom-right; False: every query row of a segment sees all its keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The calls of one launch."""

    calls: tuple[Call, ...]
    extents: Extents


def pack(segments: AttentionCall, device: torch.device, duplication: int) -> Packed:
    """The calls of `segments`, their index tensors on `device`.

    ValueError for segments that no causal kernel could take.
    """
    extents = check_call(segments)
    if not len(segments):
        return Packed((), extents)
    lse_start = (np.cumsum(segments.q_len) - segments.q_len) * segments.heads
    batches = _batches(segments, key_sets(segments), duplication)
    return Packed(tuple(_call(segments, sets, lse_start, device) for sets in batches), extents)


def key_sets(segments: AttentionCall) -> list[IntArray]:
    """Segment indices in sets, so that the segments of one set share no key of any head.

    Greedy interval colouring, head range by head range: as many sets as the most shared key has
    readers, which is the least possible.
    """
    head_group = segments.kv_head
    if (np.diff(np.unique(head_group)) < segments.kv_heads).any():
        head_group = np.zeros_like(
            head_group
        )  # head ranges overlap in part: tell segments apart by rows alone
    stop = (segments.k_start + segments.k_len).tolist()
    colour = np.zeros(len(segments), dtype=np.int64)
    busy: list[tuple[int, int]] = []  # (row from which a colour is free again, colour)
    free: list[int] = []
    colours, current = 0, -1
    for index in np.lexsort((segments.k_start, head_group)).tolist():
        if head_group[index] != current:
            busy, free, colours, current = [], [], 0, int(head_group[index])
        while busy and busy[0][0] <= segments.k_start[index]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free, colours = [colours], colours + 1
        colour[index] = heapq.heappop(free)
        heapq.heappush(busy, (stop[index], int(colour[index])))
    return [np.flatnonzero(colour == c) for c in range(int(colour.max()) + 1)]


def _batches(
    segments: AttentionCall, sets: list[IntArray], duplication: int
) -> list[list[IntArray]]:
    sizes = [int(segments.k_len[members].sum()) for members in sets]
    limit = duplication * max(sizes)
    batches: list[list[IntArray]] = []
    room = 0
    for members, size in zip(sets, sizes, strict=True):
        if size > room:
            batches.append([])
            room = limit
        batches[-1].append(members)
        room -= size
    return batches


def _call(
    segments: AttentionCall, sets: list[IntArray], lse_start: IntArray, device: torch.device
) -> Call:
    def key_rows(members: IntArray) -> Rows:
        start, length = segments.k_start[members], segments.k_len[members]
        return make_rows(start, length, segments.kv_head[members], segments.kv_heads, device)

    members = np.concatenate(sets)
    q_start, q_len = segments.q_start[members], segments.q_len[members]
    k_len = segments.k_len[members]
    set_rows = [key_rows(part) for part in sets]
    ends = np.cumsum([rows.count for rows in set_rows]).tolist()
    return Call(
        q=make_rows(q_start, q_len, segments.q_head[members], segments.heads, device),
        k=set_rows[0] if len(sets) == 1 else key_rows(members),
        k_sets=tuple(
            (end - rows.count, end, rows) for end, rows in zip(ends, set_rows, strict=True)
        ),
        cu_q=_offsets(q_len, device),
        cu_k=_offsets(k_len, device),
        max_q=int(q_len.max()),
        max_k=int(k_len.max()),
        lse_at=_lse_positions(lse_start[members], q_len, segments.heads, device),
        causal=segments.causal,
    )


def _offsets(length: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(length)).astype(np.int32)).to(device)


def _lse_positions(
    start: IntArray, q_len: IntArray, heads: int, device: torch.device
) -> torch.Tensor:
    row = np.arange(int(q_len.sum())) - np.repeat(np.cumsum(q_len) - q_len, q_len)
    first = torch.from_numpy(np.repeat(start, q_len) + row).to(device)
    stride = torch.from_numpy(np.repeat(q_len, q_len)).to(device)
    head = torch.arange(heads, device=device)
    return (first + stride * head[:, None]).flatten()
