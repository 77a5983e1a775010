"""One all-to-all of rows, and the way back: a gather, then a nonblocking collective.

    send        rows[send_index] -> packed -> all-to-all -> arrived rows, ordered by sender
    send_back   rows in the order in which they arrived -> all-to-all -> rows in `send_index` order

Rows are head-group rows, see `Operand.rows`.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from libra.data.lengths import IntArray
from libra.plan.all_to_all import AllToAll
from libra.runtime.failure import finish

_SAME_STREAM: Final = nullcontext()


@dataclass(slots=True, eq=False)
class Transfer:
    """A collective under way.  Until `wait` returns, nothing may read the rows that arrive, nor
    overwrite the rows that are sent.
    """

    arrives: Tensor
    sent: Tensor
    """Rows that are sent.  `send_back` of the same all-to-all may arrive in their place: a worker
    returns rows only after it has received them."""
    work: dist.Work | None
    """The collective; None once a CPU has waited for it."""
    group: dist.ProcessGroup

    def wait(self) -> Tensor:
        """The arrived rows, ready to read on the current stream; several streams may wait."""
        if self.work is not None:
            if self.arrives.device.type == "cpu":
                finish(self.work, self.group)
                self.work = None
            else:
                self.work.wait()  # the stream waits, not this thread
        return self.arrives


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAllToAll:
    """An `AllToAll` with its index on the device and its splits as the collective takes them."""

    send_index: Tensor
    """Rows to send, ordered by destination, int64 [sent]."""
    send_splits: list[int]
    recv_splits: list[int]
    sent: int
    received: int
    moves: bool
    """Whether any worker of the pool sends anything; equal on all workers."""
    destinations: list[tuple[int, int]]
    """Ranges of `send_index`, one per destination in worker order, empty ones left out."""

    def send(
        self, rows: Tensor, into: Tensor, packed: Tensor, group: dist.ProcessGroup
    ) -> Transfer:
        """Gather `rows` [any, width] into `packed` [sent, width] and send them; `into`
        [received, width] is written.
        """
        # Packed, the rows for each destination lie next to each other, as the collective wants.
        torch.index_select(rows, 0, self.send_index, out=packed)
        work = dist.all_to_all_single(
            into, packed, self.recv_splits, self.send_splits, group=group, async_op=True
        )
        return Transfer(into, packed, work, group)

    def send_back(self, rows: Tensor, into: Tensor, group: dist.ProcessGroup) -> Transfer:
        """Send `rows` [received, width] back to the workers from which such rows came; `into`
        [sent, width] is written, in the order of `send_index`.
        """
        # The splits change places: what was received is sent.
        work = dist.all_to_all_single(
            into, rows, self.send_splits, self.recv_splits, group=group, async_op=True
        )
        return Transfer(into, rows, work, group)


def upload(planned: AllToAll, device: torch.device) -> DeviceAllToAll:
    """Copy the index of a planned all-to-all to the device; done once per plan."""
    # Splits [2, 0, 3] are the ranges [0, 2) and [2, 5): workers without rows have none.
    bounds = itertools.accumulate(planned.send_splits.tolist(), initial=0)
    return DeviceAllToAll(
        send_index=to_device(planned.send_index, device),
        send_splits=planned.send_splits.tolist(),
        recv_splits=planned.recv_splits.tolist(),
        sent=planned.sent,
        received=planned.received,
        moves=planned.moves,
        destinations=[(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop],
    )


def to_device(index: IntArray, device: torch.device) -> Tensor:
    """The indices on the device, without waiting for the copy."""
    return torch.from_numpy(index).to(device, non_blocking=True)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Run on `stream`, after all work that the current stream has so far; None stays on the
    current stream.

    Afterwards the current stream has to wait for the last transfer that was posted inside, before
    it uses any tensor that the work inside wrote.
    """
    if stream is None:
        return _SAME_STREAM
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)
