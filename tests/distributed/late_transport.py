"""An all-to-all between threads that keeps only the promises that real ones make.

    post     nothing moves yet; what will be written holds no number until it is waited for
    wait     of the receiver or the sender, whoever waits first: rows are copied now, from the
             sender's buffer as it is now
    return   once this rank has all its rows, and all others have what it sends

So rows that are read before the wait, or overwritten between post and wait, show: in the numbers,
and in a comparison of each buffer with what it held when it was posted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

_PATIENCE = 8.0


@dataclass(eq=False)
class Posted:
    """One rank's side of an all-to-all."""

    into: torch.Tensor
    arriving: Sequence[int]
    """Rows from each rank."""
    rows: torch.Tensor
    leaving: Sequence[int]
    """Rows to each rank."""
    held: torch.Tensor
    """A copy of `rows`, made when they were posted."""
    taken: set[int] = field(default_factory=set)
    """Ranks that have their rows."""


class LateWorld:
    """What all ranks have posted, in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.posted: list[list[Posted]] = [[] for _ in range(size)]

    def all_to_all_single(
        self,
        into: torch.Tensor,
        rows: torch.Tensor,
        arriving: Sequence[int],
        leaving: Sequence[int],
        *,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> LateWork:
        """As in torch.distributed."""
        assert async_op and len(into) == sum(arriving) and len(rows) == sum(leaving)
        rank = dist.get_rank()
        with self.changed:
            mine = Posted(into, arriving, rows, leaving, rows.clone())
            self.posted[rank].append(mine)
            if not any(overlap(into, each.rows) for each in self.under_way(rank)):
                into.fill_(torch.nan)
            self.changed.notify_all()
        return LateWork(self, rank, len(self.posted[rank]) - 1)

    def under_way(self, rank: int) -> list[Posted]:
        """What others have yet to take from `rank`."""
        return [mine for mine in self.posted[rank] if len(mine.taken) < self.size]

    def deliver(self, turn: int, sender: int, receiver: int) -> None:
        """Copy one rank's rows to another, if they have not been and once both have posted."""
        for rank in (sender, receiver):
            posts = self.posted[rank]
            if not self.changed.wait_for(lambda posts=posts: len(posts) > turn, _PATIENCE):
                raise TimeoutError(f"rank {rank} has not posted message {turn}")
        source, target = self.posted[sender][turn], self.posted[receiver][turn]
        if receiver in source.taken:
            return
        source.taken.add(receiver)
        sent, due = part(source.leaving, receiver), part(target.arriving, sender)
        assert source.leaving[receiver] == target.arriving[sender], "both count alike"
        now, before = (rows[sent].view(torch.uint8) for rows in (source.rows, source.held))
        assert torch.equal(now, before), f"rank {sender} overwrote rows of message {turn} under way"
        target.into[due] = source.rows[sent]


class LateWork:
    """An operation that moves its rows when it is waited for."""

    def __init__(self, world: LateWorld, rank: int, turn: int) -> None:
        self._world, self._rank, self._turn = world, rank, turn
        self._done = False

    def is_completed(self) -> bool:
        """Never before a wait."""
        return self._done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Take what the others have sent, and see that they have what this rank has."""
        if not self._done:
            with self._world.changed:
                for other in range(self._world.size):
                    self._world.deliver(self._turn, other, self._rank)
                    self._world.deliver(self._turn, self._rank, other)
        self._done = True
        return True


def part(counts: Sequence[int], rank: int) -> slice:
    """The rows of `rank` in a buffer."""
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


@contextlib.contextmanager
def late(size: int) -> Iterator[LateWorld]:
    """Let all-to-alls of `size` threaded ranks be late."""
    world = LateWorld(size)
    with mock.patch.object(dist, "all_to_all_single", world.all_to_all_single):
        yield world
