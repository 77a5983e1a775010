"""A chunk's Q, K and V on their way to who computes with them, and outputs on theirs back.

    hop        1                  2
    K, V       holder -> relay    relay -> the others who need the rows
               holder -> those who need rows that no one else does

The second hop waits for the first.  A GPU's streams do, beside the current one, so both are posted
together.  On a CPU this thread waits: chunk 0's second hop is posted with its first, the others one
chunk ahead.

    landed     | from holders | from relays | own |     in the kv buffer itself, or apart where the
    buffer     | need | need | need | ...         |     rows of a need arrive in another order

Legend: T local rows, R buffer rows, N heads, D key dim, E value dim; `_XW` is a tensor seen as head_group
rows of width W.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from libra.runtime.buffers import Fetched
from libra.runtime.device_plan import DevicePlan
from libra.runtime.torch_private import stage
from libra.runtime.transport import DeviceAllToAll, Flight, aside, dispatch, give_back
from libra.runtime.workspace import Space


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """K or V of one chunk on its way into its buffer."""

    local_XW: torch.Tensor
    landed_RW: torch.Tensor
    """Where rows land: the buffer itself, or apart from it."""
    buffer_RW: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Inbound:
    """A chunk's transfers under way."""

    landings: list[Landing]
    """K, then V; empty if the chunk brings none."""
    flights: list[Flight]
    """Those of K and V come first."""


@dataclass(frozen=True, slots=True, eq=False)
class Return:
    """Rows that come back to where their queries were sent from."""

    local_XW: torch.Tensor
    message: DeviceAllToAll
    flight: Flight

    def finish(self) -> None:
        """Write them there once they have arrived."""
        with stage("return"):
            rows = self.flight.wait()
            if self.message.sent:
                self.local_XW.index_copy_(0, self.message.send, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """The messages of one pass, to be posted in the same order by every worker of the pool."""

    device_plan: DevicePlan
    group: dist.ProcessGroup
    space: Space
    """For what is under way."""
    packed: dict[int, torch.Tensor] = field(default_factory=dict)
    """What was sent last the way of each chunk's queries.  Each worker's rows are free for those
    that it returns, for it has received them."""

    def fetch(
        self,
        chunk: int,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TNE: torch.Tensor,
        fetched: Fetched,
    ) -> Inbound:
        """Post a chunk's K, V and Q, in this order, and the second hop unless it would wait."""
        device_plan, head_groups = self.device_plan, self.device_plan.rank_plan.head_groups
        q, kv, assembly = device_plan.q[chunk], device_plan.kv[chunk], device_plan.assembly[chunk]
        inbound = Inbound([], [])
        if not (kv.moves or assembly.rows or q.moves):
            return inbound
        with stage("dispatch"):
            if kv.moves or assembly.rows:
                for local, buffer in ((k_TND, fetched.k_RND), (v_TNE, fetched.v_RNE)):
                    local_XW = head_group_rows(local, head_groups.kv_heads)
                    buffer_RW = head_group_rows(buffer[chunk], head_groups.kv_heads)
                    apart = assembly.order is not None
                    landed_RW = self.space.take(*buffer_RW.shape) if apart else buffer_RW
                    inbound.landings.append(Landing(local_XW, landed_RW, buffer_RW))
                    if kv.moves:
                        into_RW = landed_RW[: kv.received]
                        inbound.flights.append(self._dispatch(kv, local_XW, into_RW))
            inbound.flights.extend(self.send_along(chunk, q_TND, fetched.q_RND[chunk]))
        if chunk == 0 or not device_plan.blocks[chunk]:
            self._pass_on(chunk, inbound)
        return inbound

    def send_along(self, chunk: int, local: torch.Tensor, into: torch.Tensor) -> list[Flight]:
        """Post rows of `local` [T, N, D] the way of a chunk's queries; `into` [R, N, D] is written.
        Empty if nothing moves.
        """
        message, heads = self.device_plan.q[chunk], self.device_plan.rank_plan.head_groups.heads
        if not message.moves:
            return []
        local_XW = head_group_rows(local, heads)
        packed = self.packed[chunk] = self.space.take(message.sent, local_XW.shape[1])
        return [dispatch(message, local_XW, head_group_rows(into, heads), packed, self.group)]

    def land(self, chunk: int, inbound: list[Inbound]) -> None:
        """Wait for a chunk, complete its K and V, and see the next chunk's on their way."""
        now, assembly = inbound[chunk], self.device_plan.assembly[chunk]
        if now.flights:
            with stage("wait"):
                for flight in now.flights:
                    flight.wait()
        for landing in now.landings:
            if assembly.own is not None:
                last_RW = landing.landed_RW[assembly.rows - len(assembly.own) :]
                torch.index_select(landing.local_XW, 0, assembly.own, out=last_RW)
            if assembly.order is not None:
                torch.index_select(landing.landed_RW, 0, assembly.order, out=landing.buffer_RW)
        after = chunk + 1
        if after < self.device_plan.chunks and self.device_plan.blocks[after]:
            self._pass_on(after, inbound[after])

    def _dispatch(
        self, message: DeviceAllToAll, rows_XW: torch.Tensor, into_RW: torch.Tensor
    ) -> Flight:
        packed = self.space.take(message.sent, rows_XW.shape[1])
        return dispatch(message, rows_XW, into_RW, packed, self.group)

    def _pass_on(self, chunk: int, inbound: Inbound) -> None:
        """Post the second hop of a chunk's K and V; nothing if none moves."""
        first, second = self.device_plan.kv[chunk], self.device_plan.relay[chunk]
        if not second.moves:
            return
        until = first.received + second.received
        with stage("relay"), aside(self.device_plan.multicast_stream):
            for landing, flight in zip(inbound.landings, inbound.flights[:2], strict=True):
                flight.wait()
                into_RW = landing.landed_RW[first.received : until]
                inbound.flights.append(self._dispatch(second, landing.landed_RW, into_RW))

    def post_return(self, chunk: int, rows: torch.Tensor, local: torch.Tensor) -> list[Return]:
        """Post `rows` [R, N, E], computed for others, back to those who sent the queries; what
        comes back belongs into `local` [T, N, E].  Empty if nothing moves.
        """
        message, heads = self.device_plan.q[chunk], self.device_plan.rank_plan.head_groups.heads
        if not message.moves:
            return []
        rows_RW = head_group_rows(rows, heads)
        packed = self.packed[chunk]
        into = packed if packed.shape[1] == rows_RW.shape[1] else None
        flight = give_back(message, rows_RW, self.space, self.group, into)
        return [Return(head_group_rows(local, heads), message, flight)]


def head_group_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """A contiguous [rows, heads of all head_groups, dim] as head_group rows [rows * head_groups, heads * dim]."""
    return tensor.view(-1, heads * tensor.shape[2])
