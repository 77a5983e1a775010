"""A route made ready for one device: index tensors uploaded, kernel calls prepared, buffer sizes
known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from libra.config import HeadShape
from libra.plan.route import Assembly, Route
from libra.runtime.kernels.segments import Kernel
from libra.runtime.transport import DeviceMessage, to_device


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAssembly:
    """An `Assembly` with its indices on the device."""

    rows: int
    received_from: torch.Tensor
    received_to: torch.Tensor
    local_from: torch.Tensor
    local_to: torch.Tensor

    def gather(self, buffer: torch.Tensor, local: torch.Tensor) -> None:
        """Complete a kv buffer [rows, width]: assembled ranges from received rows and `local` kv
        lane rows.
        """
        if len(self.received_to):
            buffer[self.received_to] = buffer[self.received_from]
        if len(self.local_to):
            buffer[self.local_to] = local.index_select(0, self.local_from)

    def scatter_add(self, gradient: torch.Tensor, local: torch.Tensor) -> None:
        """The transpose of `gather`: fold a buffer's gradient onto received rows and onto
        `local`.
        """
        if len(self.received_to):
            gradient[self.received_from] = gradient[self.received_to]
        if len(self.local_to):
            local.index_add_(0, self.local_from, gradient.index_select(0, self.local_to))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLaunch:
    """A `Launch` with the kernel's own preparation."""

    chunk: int
    q_buffer: int
    kv_buffer: int
    prepared: Any
    lse: slice
    """Its part of the flat LSE."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Everything the executor repeats in each layer, for one head shape on one device."""

    route: Route
    heads: HeadShape
    kernel: Kernel
    q: tuple[DeviceMessage, ...]
    kv: tuple[DeviceMessage, ...]
    relay: tuple[DeviceMessage, ...]
    assembly: tuple[DeviceAssembly, ...]
    launches: tuple[DeviceLaunch, ...]
    padding: torch.Tensor
    aside: torch.cuda.Stream | None
    """Where rows are passed on, beside the work of the current stream; None has them wait there."""

    @property
    def chunks(self) -> int:
        """M."""
        return len(self.q)

    def launches_of(self, chunk: int) -> list[DeviceLaunch]:
        """Kernel calls that run once `chunk` has arrived."""
        return [launch for launch in self.launches if launch.chunk == chunk]


def make_program(
    route: Route,
    heads: HeadShape,
    kernel: Kernel,
    device: torch.device,
    aside: torch.cuda.Stream | None = None,
) -> Program:
    """Prepare `route` for `device`; relays pass rows on in the stream `aside`."""
    launches, at = [], 0
    for launch in route.launches:
        size = launch.segments.lse_size
        launches.append(
            DeviceLaunch(
                chunk=launch.chunk,
                q_buffer=launch.q_buffer,
                kv_buffer=launch.kv_buffer,
                prepared=kernel.prepare(launch.segments, device),
                lse=slice(at, at + size),
            )
        )
        at += size
    return Program(
        route=route,
        heads=heads,
        kernel=kernel,
        q=tuple(to_device(message, device) for message in route.q),
        kv=tuple(to_device(message, device) for message in route.kv),
        relay=tuple(to_device(message, device) for message in route.relay),
        assembly=tuple(_upload(assembly, device) for assembly in route.assembly),
        launches=tuple(launches),
        padding=torch.from_numpy(route.padding).to(device),
        aside=aside,
    )


def _upload(assembly: Assembly, device: torch.device) -> DeviceAssembly:
    def index(array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return DeviceAssembly(
        rows=assembly.rows,
        received_from=index(assembly.received_from),
        received_to=index(assembly.received_to),
        local_from=index(assembly.local_from),
        local_to=index(assembly.local_to),
    )
