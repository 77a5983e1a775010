"""Moving lane rows between workers: one gather and one nonblocking all-to-all a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from libra.plan.messages import Message
from libra.runtime.loss import finish


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMessage:
    """A `Message` with its index on the device and its counts as the collective wants them."""

    send: torch.Tensor
    """Local lane rows to send, int64 [sent]."""
    send_counts: list[int]
    recv_counts: list[int]
    sent: int
    received: int
    moves: bool
    senders: list[tuple[int, int]]
    """Ranges of `send`, one a destination in worker order, empty ones left out."""


def to_device(message: Message, device: torch.device) -> DeviceMessage:
    """Upload a message's index; made once per plan."""
    counts = message.send_counts.tolist()
    ranges, at = [], 0
    for count in counts:
        if count:
            ranges.append((at, at + count))
        at += count
    return DeviceMessage(
        send=torch.from_numpy(message.send).to(device, non_blocking=True),
        send_counts=counts,
        recv_counts=message.recv_counts.tolist(),
        sent=at,
        received=message.received,
        moves=message.moves,
        senders=ranges,
    )


class Flight:
    """A transfer under way.  `wait` returns what arrives; until then nothing may read it."""

    __slots__ = ("_arrives", "_group", "_sends", "_work")

    def __init__(
        self,
        arrives: torch.Tensor,
        sends: torch.Tensor,
        group: dist.ProcessGroup,
        work: dist.Work | None,
    ) -> None:
        self._arrives = arrives
        self._sends: torch.Tensor | None = sends  # must outlive the transfer
        self._group = group
        self._work = work

    def wait(self) -> torch.Tensor:
        """The arrived rows, ready to read on the current stream."""
        if self._work is not None:
            if self._arrives.device.type == "cpu":
                finish(self._work, self._group)
            else:
                self._work.wait()  # the stream waits, not this thread
            self._work, self._sends = None, None
        return self._arrives

    def arrived(self) -> torch.Tensor:
        """The arrived rows, ready to read on the current stream where another one will `wait`: what
        the transfer uses stays until then.
        """
        if self._arrives.device.type == "cpu":
            return self.wait()
        if self._work is not None:
            self._work.wait()
        return self._arrives


@contextmanager
def aside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on `stream`, after all that the current stream has been given so far; None stays on it.

    Memory that is allocated inside may be freed once the current stream waits for what uses it: the
    next block that reuses it begins with that wait.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def dispatch(
    message: DeviceMessage, rows: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup
) -> Flight:
    """Send the message's rows of `rows` [local lane rows, width]; `into` [received, width] is
    written.
    """
    if not message.moves:
        return Flight(into, rows, group, None)
    packed = rows.index_select(0, message.send)
    work = dist.all_to_all_single(
        into, packed, message.recv_counts, message.send_counts, group=group, async_op=True
    )
    return Flight(into, packed, group, work)


def give_back(message: DeviceMessage, rows: torch.Tensor, group: dist.ProcessGroup) -> Flight:
    """Send `rows` [received, width] back the way the message came; [sent, width] arrive, in the
    order of `send`.
    """
    arrives = rows.new_empty((message.sent, rows.shape[1]))
    if not message.moves:
        return Flight(arrives, rows, group, None)
    work = dist.all_to_all_single(
        arrives, rows, message.send_counts, message.recv_counts, group=group, async_op=True
    )
    return Flight(arrives, rows, group, work)
