"""A chunk's Q, K and V on their way, and dK and dV on theirs back.

    hop        1                  2
    K, V       holder -> relay    relay -> the others who need the rows
               holder -> those who need rows that no one else does
    dK, dV     the others -> relay, who adds them to its own; then all -> holder

The second hop waits for the first.  A GPU's streams do, beside the current one, so both are posted
together.  On a CPU this thread waits: chunk 0's second hop is posted with its first, the others one
chunk ahead, and dK and dV go on one chunk later.

Legend: T local rows, R buffer rows, N heads, D key dim, E value dim; `_XW` is a tensor seen as lane
rows of width W.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import record_function

from libra.runtime.buffers import Fetched
from libra.runtime.program import Program
from libra.runtime.transport import DeviceMessage, Flight, aside, dispatch, give_back


def fetch(
    program: Program,
    group: dist.ProcessGroup,
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    fetched: Fetched,
    chunk: int,
) -> list[Flight]:
    """Post a chunk's K, V and Q, in this order: K and V may have a second hop, posted at once
    unless it would wait.
    """
    lanes = program.route.lanes
    q, kv = program.q[chunk], program.kv[chunk]
    with record_function("libra::dispatch"):
        flights = []
        for message, local, heads, into in (
            (kv, k_TND, lanes.kv_heads, fetched.k_RND[chunk]),
            (kv, v_TNE, lanes.kv_heads, fetched.v_RNE[chunk]),
            (q, q_TND, lanes.heads, fetched.q_RND[chunk]),
        ):
            width = heads * local.shape[2]
            into_RW = into.view(-1, width)[: message.received]
            flights.append(dispatch(message, local.view(-1, width), into_RW, group))
    if chunk == 0 or not blocks(program, chunk):
        flights += _pass_on(program, group, flights, fetched, chunk)
    return flights


def blocks(program: Program, buffer: int) -> bool:
    """Whether the second hop of a kv buffer would keep this thread waiting for the first."""
    return program.aside is None and program.relay[buffer].moves


def idle_chunks(program: Program, *, gradients: bool) -> int:
    """Leading chunks in which this worker computes nothing for others, and so sends nothing back:
    their returns can be posted before anything is computed.

    They end where a second hop is posted between returns, for all must post in one order.
    """
    for chunk in range(program.chunks):
        done = [n for n in range(program.chunks) if gradients and program.route.kv_done[n] == chunk]
        rows = program.q[chunk].received + sum(program.assembly[n].rows for n in done)
        hops = [*done, *range(chunk + 1, min(chunk + 2, program.chunks))]
        if rows or any(blocks(program, n) for n in hops):
            return chunk
    return program.chunks


def _pass_on(
    program: Program, group: dist.ProcessGroup, flights: list[Flight], fetched: Fetched, chunk: int
) -> list[Flight]:
    """Post the second hop of a chunk's K and V, whose flights come first; none if none moves."""
    first, second = program.kv[chunk], program.relay[chunk]
    if not second.moves:
        return []
    passed = []
    with record_function("libra::relay"), aside(program.aside):
        for flight, buffer in zip(flights[:2], _keys(fetched, chunk), strict=True):
            flight.arrived()
            rows_RW = buffer.view(-1, buffer.shape[1] * buffer.shape[2])
            into_RW = rows_RW[first.received : first.received + second.received]
            passed.append(dispatch(second, rows_RW, into_RW, group))
    return passed


def _keys(fetched: Fetched, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    return fetched.k_RND[chunk], fetched.v_RNE[chunk]


def land(
    program: Program,
    group: dist.ProcessGroup,
    inbound: list[list[Flight]],
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    fetched: Fetched,
    chunk: int,
) -> None:
    """Wait for a chunk, complete its K and V ranges, and see the next chunk's on their way."""
    with record_function("libra::wait"):
        for flight in inbound[chunk]:
            flight.wait()
        assembly = program.assembly[chunk]
        for local, buffer in zip((k_TND, v_TNE), _keys(fetched, chunk), strict=True):
            width = buffer.shape[1] * buffer.shape[2]
            assembly.gather(buffer.view(-1, width), local.view(-1, width))
    after = chunk + 1
    if after < program.chunks and blocks(program, after):
        inbound[after] += _pass_on(program, group, inbound[after], fetched, after)


@dataclass(frozen=True, slots=True)
class Partial:
    """dK and dV of a kv buffer, and those that relays collect on their way to it."""

    buffer: int
    sums_RW: list[torch.Tensor]
    local_XW: list[torch.Tensor]
    """Where they are added in the end."""
    collected: list[Flight]


@dataclass(frozen=True, slots=True)
class Homeward:
    """dK and dV of a kv buffer under way to those who hold the rows."""

    flights: list[Flight]
    partial: Partial
    """Kept until they have arrived: another stream may still read it."""


def collect(
    program: Program,
    group: dist.ProcessGroup,
    buffer: int,
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    dtype: torch.dtype,
) -> Partial:
    """Fold a kv buffer's (sums, local sums) onto received rows; post those that relays collect."""
    first, relay = program.kv[buffer], program.relay[buffer]
    partial = Partial(buffer, [], [], [])
    for sums, local_XW in pairs:
        sums_RW = sums.view(-1, local_XW.shape[1])
        program.assembly[buffer].scatter_add(sums_RW, local_XW)
        rows_RW = sums_RW[first.received : first.received + relay.received].to(dtype)
        partial.sums_RW.append(sums_RW)
        partial.local_XW.append(local_XW)
        partial.collected.append(give_back(relay, rows_RW, group))
    return partial


def send_home(
    program: Program, group: dist.ProcessGroup, partial: Partial, dtype: torch.dtype
) -> Homeward:
    """Add what relays collected, and post all that goes to those who hold the rows."""
    first, relay = program.kv[partial.buffer], program.relay[partial.buffer]
    flights = []
    with aside(program.aside if relay.moves else None):
        for sums_RW, flight in zip(partial.sums_RW, partial.collected, strict=True):
            if relay.moves:
                add(sums_RW, relay, flight.arrived())
            flights.append(give_back(first, sums_RW[: first.received].to(dtype), group))
    return Homeward(flights, partial)


def place(local_XW: torch.Tensor, message: DeviceMessage, flight: Flight) -> None:
    """Write returned rows to where they were sent from."""
    with record_function("libra::return"):
        rows = flight.wait()
        if message.sent:
            local_XW.index_copy_(0, message.send, rows)


def add(local_XW: torch.Tensor, message: DeviceMessage, rows: torch.Tensor) -> None:
    """Add returned partial sums, one worker after the other: rows of one worker are distinct, so
    the order is fixed.
    """
    with record_function("libra::return"):
        for start, stop in message.senders:
            local_XW.index_add_(0, message.send[start:stop], rows[start:stop].to(local_XW.dtype))
