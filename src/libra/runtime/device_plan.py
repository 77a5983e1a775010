"""A rank_plan made ready for one device: index tensors uploaded, kernel calls prepared, buffer sizes
known.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from libra.config import HeadShape
from libra.plan.all_to_all import AllToAll
from libra.plan.memory import CallMemory, rank_memory
from libra.plan.rank_plan import LOCAL, Assembly, RankPlan
from libra.runtime.kernels.interface import Kernel
from libra.runtime.transport import DeviceAllToAll, to_device


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAssembly:
    """An `Assembly` with its indices on the device."""

    rows: int
    own: torch.Tensor | None
    """Local head_group rows that land last, int64; None if none does."""
    order: torch.Tensor | None
    """Landed row of each buffer row, int64 [rows]; None if rows land in the buffer itself."""
    place: torch.Tensor | None
    """Buffer row of each landed row."""
    passed_on: torch.Tensor
    """Buffer rows that a relay passes on, in the order of its message, int64."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLaunch:
    """A `Launch` with the kernel's own preparation."""

    q_buffer: int
    kv_buffer: int
    prepared: Any
    lse: slice
    """Its part of the flat LSE."""


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """Everything the executor repeats in each layer, for one head shape on one device."""

    rank_plan: RankPlan
    heads: HeadShape
    kernel: Kernel
    q: tuple[DeviceAllToAll, ...]
    kv: tuple[DeviceAllToAll, ...]
    relay: tuple[DeviceAllToAll, ...]
    assembly: tuple[DeviceAssembly, ...]
    launches: tuple[tuple[DeviceLaunch, ...], ...]
    """Those that wait for nothing, then those of each chunk."""
    padding: torch.Tensor | None
    refetch: bool
    """Whether the backward fetches Q, K and V again."""
    memory: CallMemory[int]
    """Elements that a call takes."""
    multicast_stream: torch.cuda.Stream | None
    """Where rows are passed on, beside the work of the current stream; None has them wait there."""
    q_starts: tuple[int, ...]
    """Rows of the q buffers before each chunk, and of all."""
    kv_starts: tuple[int, ...]
    """The same of the kv buffers."""
    kv_returns: tuple[tuple[int, ...], ...]
    """The kv buffers whose gradients return after each chunk: those that anyone reads."""
    blocks: tuple[bool, ...]
    """Whether the second hop of each kv buffer would keep the thread waiting for the first."""
    idle_forward: int
    """Leading chunks in which this worker computes nothing for others, and so sends nothing back:
    their returns are posted before anything is computed."""
    idle_backward: int

    @property
    def chunks(self) -> int:
        """M."""
        return len(self.q)

    def launches_of(self, chunk: int) -> tuple[DeviceLaunch, ...]:
        """Kernel calls that run once `chunk` has arrived; LOCAL: at once."""
        return self.launches[chunk - LOCAL]  # LOCAL is -1


def make_device_plan(
    rank_plan: RankPlan,
    heads: HeadShape,
    kernel: Kernel,
    device: torch.device,
    multicast_stream: torch.cuda.Stream | None = None,
    *,
    refetch: bool = False,
) -> DevicePlan:
    """Prepare `rank_plan` for `device`; relays pass rows on in `multicast_stream`, and `refetch` has
    the backward fetch Q, K and V again.
    """
    chunks = range(len(rank_plan.q))
    launches: list[list[DeviceLaunch]] = [[] for _ in range(len(chunks) + 1)]
    at = 0
    for launch in rank_plan.launches:
        size = launch.segments.lse_size
        launches[launch.chunk - LOCAL].append(
            DeviceLaunch(
                q_buffer=launch.q_buffer,
                kv_buffer=launch.kv_buffer,
                prepared=kernel.prepare(launch.segments, device),
                lse=slice(at, at + size),
            )
        )
        at += size
    blocks = tuple(hop_blocks(relay, multicast_stream) for relay in rank_plan.relay)
    read = [n for n in chunks if rank_plan.kv[n].moves or rank_plan.assembly[n].rows]
    returns = tuple(tuple(n for n in read if rank_plan.kv_done[n] == chunk) for chunk in chunks)
    return DevicePlan(
        rank_plan=rank_plan,
        heads=heads,
        kernel=kernel,
        q=tuple(to_device(message, device) for message in rank_plan.q),
        kv=tuple(to_device(message, device) for message in rank_plan.kv),
        relay=tuple(to_device(message, device) for message in rank_plan.relay),
        assembly=tuple(
            _upload(assembly, relay, device)
            for assembly, relay in zip(rank_plan.assembly, rank_plan.relay, strict=True)
        ),
        launches=tuple(map(tuple, launches)),
        padding=_index(rank_plan.padding, device),
        refetch=refetch,
        memory=rank_memory(rank_plan, heads, refetch=refetch),
        multicast_stream=multicast_stream,
        q_starts=_starts([message.received for message in rank_plan.q]),
        kv_starts=_starts([assembly.rows for assembly in rank_plan.assembly]),
        kv_returns=returns,
        blocks=blocks,
        idle_forward=_idle_chunks(rank_plan, blocks, [()] * len(chunks)),
        idle_backward=_idle_chunks(rank_plan, blocks, returns),
    )


def hop_blocks(relay: AllToAll, multicast_stream: torch.cuda.Stream | None) -> bool:
    """Whether a message of the second hop keeps the thread waiting for the first."""
    return multicast_stream is None and relay.moves


def _starts(rows: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(rows, initial=0))


def _idle_chunks(
    rank_plan: RankPlan, blocks: Sequence[bool], returns: Sequence[Sequence[int]]
) -> int:
    """Leading chunks after which this worker has no row to send back.

    They end where a second hop is posted between returns, for all must post in one order.
    """
    for chunk, buffers in enumerate(returns):
        rows = rank_plan.q[chunk].received + sum(rank_plan.assembly[n].rows for n in buffers)
        if rows or any(blocks[n] for n in buffers) or any(blocks[chunk + 1 : chunk + 2]):
            return chunk
    return len(returns)


def _upload(assembly: Assembly, relay: AllToAll, device: torch.device) -> DeviceAssembly:
    order = place = None
    passed_on = relay.send
    if assembly.place is not None:
        landed = np.empty_like(assembly.place)
        landed[assembly.place] = np.arange(assembly.rows)
        order, place = _index(landed, device), _index(assembly.place, device)
        passed_on = assembly.place[relay.send]
    return DeviceAssembly(
        rows=assembly.rows,
        own=_index(assembly.own, device),
        order=order,
        place=place,
        passed_on=torch.from_numpy(passed_on).to(device, non_blocking=True),
    )


def _index(array: np.ndarray[Any, np.dtype[np.int64]], device: torch.device) -> torch.Tensor | None:
    """The indices on the device; None for none, so that nothing is launched for them."""
    return torch.from_numpy(array).to(device, non_blocking=True) if len(array) else None
