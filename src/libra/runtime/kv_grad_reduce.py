"""Gradients of K and V, from the workers that computed parts of them to the holders of the rows.

The sum goes the way of `exchange` in reverse:

    hop 2      the other readers -> first reader, who adds the rows to its own sums
    hop 1      first readers and readers of unshared rows -> holder, who adds all of them up

Hop 1 has to wait for hop 2.  A GPU's second stream waits; on a CPU the thread waits, one chunk
later.  Sums are accumulated in fp32 (fp64 for fp64) and travel in the dtype of the tensors.

Legend: T local rows, R buffer rows, N heads, D key dim, E value dim; `_XW` and `_RW` are tensors
seen as head-group rows of width W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from libra.plan.attention_calls import LOCAL
from libra.runtime.all_to_all import DeviceAllToAll, Transfer, on_stream
from libra.runtime.exchange import Exchange
from libra.runtime.torch_private import stage
from libra.runtime.workspace import Operand, piece


@dataclass(frozen=True, slots=True, eq=False)
class CastScratch:
    """Flat fp32 scratch in which rows are cast or permuted before they are added.

    There are two, because the two hops add in different streams.
    """

    holders: Tensor
    first_readers: Tensor


class KVGradReduce:
    """dK or dV of one kv buffer on its way to the holders: `collect`, `send`, then `finish`."""

    def __init__(
        self, exchange: Exchange, scratch: CastScratch, buffer: int, grads: Operand
    ) -> None:
        self._kv = exchange.device_plan.kv[buffer]
        self.blocks = self._kv.blocks
        """Whether `send` blocks the thread until the rows of hop 2 have arrived."""
        self._exchange = exchange
        self._scratch = scratch
        self._sums_RW = grads.rows(buffer)
        self._local_XW = grads.rows(LOCAL)
        self._transfer: Transfer | None = None
        """The last hop that is posted."""
        self._cast_RW = self._sums_RW
        """Room for the sums in the dtype that travels, where they have to be permuted too."""
        permuted = self._kv.buffer_of_landed is not None
        if permuted and self._sums_RW.dtype != exchange.space.flat.dtype:
            self._cast_RW = exchange.space.take(*self._sums_RW.shape)

    def collect(self) -> None:
        """Add the sums of this worker's own rows to its local gradient, and post hop 2."""
        kv, arrived = self._kv, self._kv.first.received + self._kv.second.received
        # Own rows lie behind those that landed; in a permuted buffer they lie anywhere.
        if kv.own is not None:
            own_RW = self._sums_RW[arrived:]
            if kv.buffer_of_landed is not None:
                own_RW = piece(self._scratch.holders, 0, (len(kv.own), self._sums_RW.shape[1]))
                torch.index_select(self._sums_RW, 0, kv.buffer_of_landed[arrived:], out=own_RW)
            self._local_XW.index_add_(0, kv.own, own_RW)
        if kv.second.moves:
            self._transfer = self._send_back(kv.second, kv.first.received, arrived)

    def send(self) -> None:
        """Add the rows of hop 2 to the sums, and post hop 1."""
        kv = self._kv
        if not kv.first.moves:
            return
        stream = None if self._transfer is None else self._exchange.device_plan.multicast_stream
        # Without hop 2 nothing has to be waited for, so no second stream is needed.
        with on_stream(stream):
            if self._transfer is not None:
                rows, ranges = self._transfer.wait(), kv.second.destinations
                add_rows(self._sums_RW, kv.passed_on, ranges, rows, self._scratch.first_readers)
            self._transfer = self._send_back(kv.first, 0, kv.first.received)

    def finish(self) -> None:
        """Wait for the rows of hop 1 and add them to the local gradient."""
        if self._transfer is not None:
            rows = self._transfer.wait()
            index, ranges = self._kv.first.send_index, self._kv.first.destinations
            add_rows(self._local_XW, index, ranges, rows, self._scratch.holders)

    def _send_back(self, hop: DeviceAllToAll, start: int, stop: int) -> Transfer:
        """Post the sums of the landed rows [start, stop), in the dtype that travels."""
        space, width = self._exchange.space, self._sums_RW.shape[1]
        buffer_of_landed = self._kv.buffer_of_landed
        rows_RW = space.take(stop - start, width)
        if buffer_of_landed is None:
            rows_RW.copy_(self._sums_RW[start:stop])
        else:
            # A gather cannot cast: sums in fp32 are cast to bf16 in buffer order first.
            if self._cast_RW is not self._sums_RW:
                self._cast_RW.copy_(self._sums_RW)
            torch.index_select(self._cast_RW, 0, buffer_of_landed[start:stop], out=rows_RW)
        return hop.send_back(rows_RW, space.take(hop.sent, width), self._exchange.group)


def add_rows(
    sums_XW: Tensor, index: Tensor, ranges: Sequence[tuple[int, int]], rows: Tensor, scratch: Tensor
) -> None:
    """Add `rows` to `sums_XW` at `index`, one range after the other.

    Each range has the rows of one worker, which are distinct.  So every sum has a fixed order and
    repeated runs are bit-identical.
    """
    with stage("return"):
        for start, stop in ranges:  # [0, 2) from one worker, [2, 5) from the next
            part = rows[start:stop]
            if part.dtype != sums_XW.dtype:
                part = piece(scratch, 0, tuple(part.shape)).copy_(part)
            sums_XW.index_add_(0, index[start:stop], part)
