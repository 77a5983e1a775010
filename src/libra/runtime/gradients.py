"""dK and dV on their way back to those who hold the rows.

    hop     1                                              2
            the others -> relay, who adds them to its own; then all -> holder, who adds up

The second hop waits for the first: a GPU's streams do, beside the current one; on a CPU this thread
does, one chunk later.  Sums are fp32 (fp64 for fp64) and travel in the dtype of the tensors.

Legend: T local rows, R buffer rows, N heads, D key dim, E value dim; `_XW` is a tensor seen as head_group
rows of width W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from libra.runtime.device_plan import DevicePlan
from libra.runtime.exchange import head_group_rows
from libra.runtime.torch_private import stage
from libra.runtime.transport import DeviceAllToAll, Flight, aside, give_back
from libra.runtime.workspace import Space, piece


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """dK or dV of a kv buffer, and what its relays collect."""

    buffer: int
    sums_RW: torch.Tensor
    local_XW: torch.Tensor
    """Where they are added in the end."""
    narrow_RW: torch.Tensor
    """Room for them in the dtype that travels; the sums themselves if that is theirs."""
    collected: Flight | None


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """Partial sums that come back to where their keys were sent from."""

    local_XW: torch.Tensor
    message: DeviceAllToAll
    flight: Flight
    wide: torch.Tensor

    def finish(self) -> None:
        """Add them there once they have arrived."""
        add(self.local_XW, self.message.send, self.message.senders, self.flight.wait(), self.wide)


@dataclass(frozen=True, slots=True, eq=False)
class Homeward:
    """The messages of dK and dV, to be posted in the same order by every worker of the pool."""

    device_plan: DevicePlan
    group: dist.ProcessGroup
    space: Space
    """For what is under way."""
    wide: torch.Tensor
    """Room for sums that are put in order or widened, flat."""
    wide_relayed: torch.Tensor
    """The same for relays, whose stream is another."""

    def collect(self, buffer: int, sums: torch.Tensor, local: torch.Tensor) -> Partial:
        """Add the own rows of a kv buffer's `sums` [R, N, D] to `local` [T, N, D], and post those
        that relays collect.
        """
        first, relay = self.device_plan.kv[buffer], self.device_plan.relay[buffer]
        assembly, kv_heads = (
            self.device_plan.assembly[buffer],
            self.device_plan.rank_plan.head_groups.kv_heads,
        )
        sums_RW, local_XW = head_group_rows(sums, kv_heads), head_group_rows(local, kv_heads)
        arrived = first.received + relay.received
        if assembly.own is not None:
            own_RW = sums_RW[arrived:]
            if assembly.place is not None:
                own_RW = piece(self.wide, 0, (len(assembly.own), sums_RW.shape[1]))
                torch.index_select(sums_RW, 0, assembly.place[arrived:], out=own_RW)
            local_XW.index_add_(0, assembly.own, own_RW)
        narrow_RW = sums_RW
        if assembly.place is not None and sums_RW.dtype != self.space.dtype:
            narrow_RW = self.space.take(*sums_RW.shape)
        partial = Partial(buffer, sums_RW, local_XW, narrow_RW, None)
        if not relay.moves:
            return partial
        rows_RW = self._packed(partial, first.received, arrived)
        return replace(partial, collected=give_back(relay, rows_RW, self.space, self.group))

    def send_home(self, partial: Partial) -> list[Sum]:
        """Add what relays collected, and post all that goes to those who hold the rows; empty if
        nothing does.
        """
        first, relay = self.device_plan.kv[partial.buffer], self.device_plan.relay[partial.buffer]
        if not first.moves:
            return []
        with aside(None if partial.collected is None else self.device_plan.multicast_stream):
            if partial.collected is not None:
                passed_on = self.device_plan.assembly[partial.buffer].passed_on
                rows = partial.collected.wait()
                add(partial.sums_RW, passed_on, relay.senders, rows, self.wide_relayed)
            rows_RW = self._packed(partial, 0, first.received)
            flight = give_back(first, rows_RW, self.space, self.group)
        return [Sum(partial.local_XW, first, flight, self.wide)]

    def _packed(self, partial: Partial, start: int, stop: int) -> torch.Tensor:
        """Landed rows [start, stop) of the sums, in the dtype that travels."""
        sums_RW, place = partial.sums_RW, self.device_plan.assembly[partial.buffer].place
        pack_RW = self.space.take(stop - start, sums_RW.shape[1])
        if place is None:
            return pack_RW.copy_(sums_RW[start:stop])
        if partial.narrow_RW is not sums_RW:
            partial.narrow_RW.copy_(sums_RW)
        return torch.index_select(partial.narrow_RW, 0, place[start:stop], out=pack_RW)


def add(
    local_XW: torch.Tensor,
    to: torch.Tensor,
    senders: Sequence[tuple[int, int]],
    rows: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    """Add returned partial sums, one worker after the other: rows of one worker are distinct, so
    the order is fixed.
    """
    with stage("return"):
        for start, stop in senders:
            part = rows[start:stop]
            if part.dtype != local_XW.dtype:
                part = piece(wide, 0, tuple(part.shape)).copy_(part)
            local_XW.index_add_(0, to[start:stop], part)
