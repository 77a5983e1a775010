"""A rank plan prepared for one device: indices uploaded, kernel calls prepared, sizes known.

    RankPlan (numpy)  --make_device_plan-->  DevicePlan, used by every layer of a microbatch

All work that depends on the plan alone is done here, once, so that a layer launches kernels and
collectives only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from libra.config import HeadShape
from libra.data.lengths import IntArray
from libra.plan.all_to_all import AllToAll
from libra.plan.head_groups import HeadGroups
from libra.plan.memory import CallMemory
from libra.plan.rank_plan import RankPlan
from libra.runtime.all_to_all import DeviceAllToAll, to_device, upload
from libra.runtime.kernels.interface import Kernel
from libra.runtime.workspace import Operand


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKV:
    """How the K and V rows of one chunk travel, and how they lie in its kv buffer.

    Example: rows land as [b0, a0, a1, b1] and kernels read [a0, a1, b0, b1].  Then
    `landed_of_buffer` is [1, 2, 0, 3] and `buffer_of_landed` is [2, 0, 1, 3].
    """

    first: DeviceAllToAll
    """Hop 1."""
    second: DeviceAllToAll
    """Hop 2."""
    own: Tensor | None
    """Head-group rows of the local tensor that land last, int64; None if there are none."""
    landed_of_buffer: Tensor | None
    """Landed row of each buffer row, int64 [rows]; None if rows land in the buffer itself."""
    buffer_of_landed: Tensor | None
    """The inverse: buffer row of each landed row."""
    passed_on: Tensor
    """Buffer rows that this worker passes on in hop 2, in the order of their all-to-all, int64."""
    used: bool
    """Whether the kv buffer has rows here, or any worker sends rows for its own."""
    blocks: bool
    """Whether posting hop 2 blocks the thread until hop 1 has arrived."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCall:
    """An attention call with the kernel's own preparation."""

    q_buffer: int
    """LOCAL, or the chunk with which the queries arrive."""
    kv_buffer: int
    prepared: Any
    lse: slice
    """The call's part of the flat LSE."""


class Operands(NamedTuple):
    """Q, K, V and O as kernels read and write them, or their gradients dQ, dK, dV and dO."""

    q: Operand
    k: Operand
    v: Operand
    out: Operand


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """All that the executor needs in each layer, for one head shape on one device.

    Tuples have one entry per chunk unless said otherwise.
    """

    heads: HeadShape
    head_groups: HeadGroups
    kernel: Kernel
    chunks: int
    """M."""
    q: tuple[DeviceAllToAll, ...]
    kv: tuple[DeviceKV, ...]
    calls: tuple[tuple[DeviceCall, ...], ...]
    """The calls of each chunk, then, at LOCAL, which is -1, those that need local rows only."""
    lse_size: int
    """Elements of the flat LSE of all calls."""
    padding: Tensor | None
    """Local rows that belong to no sample, int64; None if there are none."""
    refetch: bool
    """Whether the backward fetches Q, K and V again."""
    memory: CallMemory[int]
    """Elements that a call allocates."""
    multicast_stream: torch.cuda.Stream | None
    """Stream that waits between the two hops of K and V; None if the thread itself waits."""
    q_starts: tuple[int, ...]
    """Row of the q buffers at which each chunk starts, and the number of rows."""
    kv_starts: tuple[int, ...]
    """The same for the kv buffers."""
    kv_returns: tuple[tuple[int, ...], ...]
    """kv buffers whose gradients return after each chunk: those that any worker reads."""
    idle_forward: int
    """Number of leading chunks in which this worker computes nothing for others.  It posts their
    returns before it computes anything, so that other workers need not wait for its own work."""
    idle_backward: int

    def operands(
        self, local: Sequence[Tensor], peer_q: Tensor, peer_kv: Tensor, peer_out: Tensor
    ) -> Operands:
        """Local Q, K, V and O, or their gradients, and the rows of other workers, flat."""
        q, k, v, out = local
        groups, dim, value_dim = self.head_groups, self.heads.dim, self.heads.value_dim
        k_elements = self.kv_starts[-1] * groups.kv_heads * dim
        return Operands(
            Operand(q, peer_q, self.q_starts, groups.heads, dim),
            Operand(k, peer_kv[:k_elements], self.kv_starts, groups.kv_heads, dim),
            Operand(v, peer_kv[k_elements:], self.kv_starts, groups.kv_heads, value_dim),
            Operand(out, peer_out, self.q_starts, groups.heads, value_dim),
        )


def make_device_plan(
    rank_plan: RankPlan,
    heads: HeadShape,
    kernel: Kernel,
    device: torch.device,
    multicast_stream: torch.cuda.Stream | None = None,
    *,
    refetch: bool = False,
) -> DevicePlan:
    """Prepare `rank_plan` for `device`.

    `multicast_stream` waits between the two hops of K and V; `refetch` makes the backward fetch
    Q, K and V again.
    """
    # Step 1: the transfers of K and V, and when their gradients return.
    # Example: kv_done [1, 1] returns the gradients of both kv buffers after chunk 1: [(), (0, 1)].
    chunks = range(len(rank_plan.q))
    kv = tuple(_upload_kv(rank_plan, chunk, device, multicast_stream) for chunk in chunks)
    kv_returns = tuple(
        tuple(n for n in chunks if kv[n].used and rank_plan.kv_done[n] == chunk) for chunk in chunks
    )
    # Step 2: upload other indices, let the kernel prepare its calls, and count what is idle.
    return DevicePlan(
        heads=heads,
        head_groups=rank_plan.head_groups,
        kernel=kernel,
        chunks=len(chunks),
        q=tuple(upload(planned, device) for planned in rank_plan.q),
        kv=kv,
        calls=_prepare_calls(rank_plan, kernel, device),
        lse_size=rank_plan.lse_size,
        padding=_index(rank_plan.padding, device),
        refetch=refetch,
        memory=rank_plan.memory,
        multicast_stream=multicast_stream,
        # Chunks with 5 and 3 rows start at rows 0 and 5 of 8: starts are (0, 5, 8).
        q_starts=tuple(accumulate([each.received for each in rank_plan.q], initial=0)),
        kv_starts=tuple(accumulate([each.rows for each in rank_plan.kv_buffers], initial=0)),
        kv_returns=kv_returns,
        idle_forward=_idle_chunks(rank_plan, kv, [()] * len(chunks)),
        idle_backward=_idle_chunks(rank_plan, kv, kv_returns),
    )


def hop_blocks(second: AllToAll, multicast_stream: torch.cuda.Stream | None) -> bool:
    """Whether posting hop 2 blocks the thread until hop 1 has arrived."""
    return multicast_stream is None and second.moves


def _prepare_calls(
    rank_plan: RankPlan, kernel: Kernel, device: torch.device
) -> tuple[tuple[DeviceCall, ...], ...]:
    """Kernel calls by the chunk that they wait for, LOCAL last; the flat LSE keeps the order of
    the rank plan.
    """
    # Calls of chunks 0, local, 0, 1 make [[first, third], [fourth], [second]].
    calls: list[list[DeviceCall]] = [[] for _ in range(len(rank_plan.q) + 1)]
    at = 0
    for call in rank_plan.calls:
        lse = slice(at, at + call.lse_size)
        prepared = kernel.prepare(call, device)
        calls[call.chunk].append(DeviceCall(call.q_buffer, call.kv_buffer, prepared, lse))
        at = lse.stop
    return tuple(map(tuple, calls))


def _idle_chunks(
    rank_plan: RankPlan, kv: Sequence[DeviceKV], kv_returns: Sequence[Sequence[int]]
) -> int:
    """Number of leading chunks after which this worker has no row to send back.

    The count ends before a chunk that posts hop 2 between its returns: every worker has to post
    all collectives in the same order, however early.
    """
    for chunk, buffers in enumerate(kv_returns):
        # Rows of queries whose outputs return, and of K and V whose gradients do.
        rows = rank_plan.q[chunk].received + sum(rank_plan.kv_buffers[n].rows for n in buffers)
        posted = [*kv[chunk + 1 : chunk + 2], *[kv[n] for n in buffers]]
        if rows or any(each.blocks for each in posted):
            return chunk
    return len(kv_returns)


def _upload_kv(
    rank_plan: RankPlan, chunk: int, device: torch.device, stream: torch.cuda.Stream | None
) -> DeviceKV:
    first, second = rank_plan.kv[chunk], rank_plan.kv_multicast[chunk]
    buffer, passed_on = rank_plan.kv_buffers[chunk], second.send_index
    permutation = buffer.permutation
    if permutation is not None:
        passed_on = permutation[passed_on]  # `second` counts rows as they land
    return DeviceKV(
        first=upload(first, device),
        second=upload(second, device),
        own=_index(buffer.own_index, device),
        landed_of_buffer=_index(None if permutation is None else np.argsort(permutation), device),
        buffer_of_landed=_index(permutation, device),
        passed_on=to_device(passed_on, device),
        used=first.moves or buffer.rows > 0,
        blocks=hop_blocks(second, stream),
    )


def _index(index: IntArray | None, device: torch.device) -> Tensor | None:
    """The indices on the device; None if there are none, so that no kernel is launched."""
    return None if index is None or not len(index) else to_device(index, device)
