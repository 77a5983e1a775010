"""Moving head_group rows between workers: one gather and one nonblocking all-to-all a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from libra.plan.all_to_all import AllToAll
from libra.runtime.failure import finish
from libra.runtime.workspace import Space


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAllToAll:
    """A `AllToAll` with its index on the device and its counts as the collective wants them."""

    send: torch.Tensor
    """Lane rows to send, int64 [sent]: local ones, or what landed at a relay."""
    send_splits: list[int]
    recv_splits: list[int]
    sent: int
    received: int
    moves: bool
    senders: list[tuple[int, int]]
    """Ranges of `send`, one a destination in worker order, empty ones left out."""


def to_device(message: AllToAll, device: torch.device) -> DeviceAllToAll:
    """Upload a message's index; made once per plan."""
    counts = message.send_splits.tolist()
    ranges, at = [], 0
    for count in counts:
        if count:
            ranges.append((at, at + count))
        at += count
    return DeviceAllToAll(
        send=torch.from_numpy(message.send).to(device, non_blocking=True),
        send_splits=counts,
        recv_splits=message.recv_splits.tolist(),
        sent=at,
        received=message.received,
        moves=message.moves,
        senders=ranges,
    )


class Flight:
    """A transfer under way.  `wait` returns what arrives; until then nothing may read it, nor
    write what is sent.
    """

    __slots__ = ("_arrives", "_group", "_work")

    def __init__(self, arrives: torch.Tensor, work: dist.Work, group: dist.ProcessGroup) -> None:
        self._arrives = arrives
        self._work: dist.Work | None = work
        self._group = group

    def wait(self) -> torch.Tensor:
        """The arrived rows, ready to read on the current stream; several streams may wait."""
        if self._work is None:
            pass
        elif self._arrives.device.type == "cpu":
            finish(self._work, self._group)
            self._work = None
        else:
            self._work.wait()  # the stream waits, not this thread
        return self._arrives


@contextmanager
def aside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on `stream`, after all that the current stream has been given so far; None stays on it.

    The current stream has to wait for a transfer that was posted last inside, before it goes on
    with what is used there.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def dispatch(
    message: DeviceAllToAll,
    rows: torch.Tensor,
    into: torch.Tensor,
    packed: torch.Tensor,
    group: dist.ProcessGroup,
) -> Flight:
    """Send the message's rows of `rows` [head_group rows, width], packed in `packed` [sent, width];
    `into` [received, width] is written.
    """
    torch.index_select(rows, 0, message.send, out=packed)
    work = dist.all_to_all_single(
        into, packed, message.recv_splits, message.send_splits, group=group, async_op=True
    )
    return Flight(into, work, group)


def give_back(
    message: DeviceAllToAll,
    rows: torch.Tensor,
    space: Space,
    group: dist.ProcessGroup,
    into: torch.Tensor | None = None,
) -> Flight:
    """Send `rows` [received, width] back the way the message came; [sent, width] arrive in `into`,
    or in `space`, in the order of `send`.

    `into` may be what was packed for the message: a worker's rows return once it has received them.
    """
    arrives = space.take(message.sent, rows.shape[1]) if into is None else into
    work = dist.all_to_all_single(
        arrives, rows, message.send_splits, message.recv_splits, group=group, async_op=True
    )
    return Flight(arrives, work, group)
