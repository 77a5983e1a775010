"""Dispatch of a chunk's Q, K and V to the workers that compute with them, and return of outputs.

K and V may travel in two hops, so that rows which several workers need leave their holder once:

    hop 1      holder -> first reader of shared rows, and -> readers of rows that no one else needs
    hop 2      first reader -> the other readers

    landed     | from holders | from first readers | own rows |
    kv buffer  | fetch | fetch | fetch | ...                  |   the same rows, fetch by fetch

Hop 2 has to wait for hop 1.  On a GPU a second stream waits, so both hops are posted together.  On
a CPU the thread itself would block: there chunk 0 posts hop 2 at once, the others one chunk ahead.

Legend: T local rows, R buffer rows, N heads, D key dim, E value dim; `_XW` and `_RW` are tensors
seen as head-group rows of width W.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from libra.plan.attention_calls import LOCAL
from libra.runtime.all_to_all import DeviceAllToAll, Transfer, on_stream
from libra.runtime.device_plan import DevicePlan, Operands
from libra.runtime.torch_private import stage
from libra.runtime.workspace import Operand, Space


@dataclass(slots=True, eq=False)
class KVArrival:
    """K or V of one chunk on its way into its kv buffer."""

    local_XW: Tensor
    landed_RW: Tensor
    """Where rows land: the kv buffer itself, or workspace if they have to be permuted."""
    buffer_RW: Tensor
    hop: Transfer | None
    """The last hop that is posted, which begins behind the one before; None if no row moves."""


@dataclass(frozen=True, slots=True, eq=False)
class Inbound:
    """A chunk's transfers under way."""

    kv: list[KVArrival]
    """K, then V; empty if this worker reads no rows of them and no worker sends any."""
    q: Transfer | None
    """Queries, or gradients of their outputs; None if no worker sends any."""

    def wait(self) -> None:
        """Wait for all rows of the chunk."""
        if self.q is None and not self.kv:
            return
        with stage("wait"):
            if self.q is not None:
                self.q.wait()
            for arrival in self.kv:
                if arrival.hop is not None:
                    arrival.hop.wait()


@dataclass(frozen=True, slots=True, eq=False)
class PendingOutput:
    """Outputs, or gradients of queries, on their way back to the workers that sent the queries."""

    local_XW: Tensor
    queries: DeviceAllToAll
    transfer: Transfer

    def finish(self) -> None:
        """Wait for the rows and write them where their queries were read."""
        with stage("return"):
            rows = self.transfer.wait()
            if self.queries.sent:
                self.local_XW.index_copy_(0, self.queries.send_index, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """The all-to-alls of one pass; every worker of the pool posts them in the same order."""

    device_plan: DevicePlan
    group: dist.ProcessGroup
    space: Space
    """Workspace for rows under way."""

    def dispatch(self, chunk: int, operands: Operands) -> Inbound:
        """Post a chunk's K, V and Q, in this order, and hop 2 unless that would block."""
        plan, kv = self.device_plan, self.device_plan.kv[chunk]
        # No worker sends anything, and this one reads no rows of its own.
        if not (kv.used or plan.q[chunk].moves):
            return Inbound([], None)
        # K and V go first: hop 2 waits for their hop 1, while Q travels.
        with stage("dispatch"):
            moved = (operands.k, operands.v) if kv.used else ()
            arrivals = [self._post_kv(chunk, operand) for operand in moved]
            inbound = Inbound(arrivals, self.post_queries(chunk, operands.q))
        # Where posting hop 2 blocks, chunk 0 posts it here, and `complete` that of later chunks.
        if chunk == 0 or not kv.blocks:
            self._multicast(chunk, inbound)
        return inbound

    def post_queries(self, chunk: int, operand: Operand) -> Transfer | None:
        """Post the chunk's queries, or gradients of their outputs, to the workers that compute
        them.  None if nothing moves.
        """
        queries = self.device_plan.q[chunk]
        if not queries.moves:
            return None
        return self._send(queries, operand.rows(LOCAL), operand.rows(chunk))

    def complete(self, chunk: int, inbound: list[Inbound]) -> None:
        """Wait for a chunk, put its K and V in order, and post hop 2 of the next chunk."""
        arriving, kv = inbound[chunk], self.device_plan.kv[chunk]
        # Step 1: wait for all rows.
        arriving.wait()
        # Step 2: own rows follow those that have landed; then all go where kernels read them.
        for arrival in arriving.kv:
            landed_RW = arrival.landed_RW
            if kv.own is not None:
                torch.index_select(arrival.local_XW, 0, kv.own, out=landed_RW[-len(kv.own) :])
            if kv.landed_of_buffer is not None:
                torch.index_select(landed_RW, 0, kv.landed_of_buffer, out=arrival.buffer_RW)
        # Step 3: a thread that hop 2 would block posts it now, while the chunk before computes.
        after = chunk + 1
        if after < self.device_plan.chunks and self.device_plan.kv[after].blocks:
            self._multicast(after, inbound[after])

    def post_return(
        self, chunk: int, operand: Operand, queries: Transfer | None
    ) -> PendingOutput | None:
        """Post the chunk's rows that were computed for others back to the senders of `queries`,
        the chunk's last `post_queries`.  Rows that come back belong into `operand.local`.
        """
        if queries is None:
            return None
        moved, rows_RW = self.device_plan.q[chunk], operand.rows(chunk)
        into = queries.sent  # free once the rows return, if they are as wide
        if into.shape[1] != rows_RW.shape[1]:
            into = self.space.take(moved.sent, rows_RW.shape[1])
        transfer = moved.send_back(rows_RW, into, self.group)
        return PendingOutput(operand.rows(LOCAL), moved, transfer)

    def _post_kv(self, chunk: int, operand: Operand) -> KVArrival:
        """Post hop 1 of a chunk's K or V."""
        kv, local_XW = self.device_plan.kv[chunk], operand.rows(LOCAL)
        landed_RW = buffer_RW = operand.rows(chunk)
        if kv.landed_of_buffer is not None:
            landed_RW = self.space.take(*buffer_RW.shape)
        into_RW = landed_RW[: kv.first.received]
        hop = self._send(kv.first, local_XW, into_RW) if kv.first.moves else None
        return KVArrival(local_XW, landed_RW, buffer_RW, hop)

    def _multicast(self, chunk: int, inbound: Inbound) -> None:
        """Post hop 2 of a chunk's K and V, if any worker passes rows on."""
        first, second = self.device_plan.kv[chunk].first, self.device_plan.kv[chunk].second
        if not second.moves:
            return
        # 3 rows from holders and 2 from first readers: hop 2 lands in rows [3, 5).
        until = first.received + second.received
        with stage("multicast"), on_stream(self.device_plan.multicast_stream):
            for arrival in inbound.kv:
                assert arrival.hop is not None  # a row has arrived before it is passed on
                arrival.hop.wait()
                into_RW = arrival.landed_RW[first.received : until]
                arrival.hop = self._send(second, arrival.landed_RW, into_RW)

    def _send(self, all_to_all: DeviceAllToAll, rows_XW: Tensor, into_RW: Tensor) -> Transfer:
        packed = self.space.take(all_to_all.sent, rows_XW.shape[1])
        return all_to_all.send(rows_XW, into_RW, packed, self.group)
