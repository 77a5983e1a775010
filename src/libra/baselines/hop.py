"""Rows on their way between a few ranks: an all-to-all whose other parts are empty."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from libra.runtime.failure import finish
from libra.runtime.torch_private import stage


class Flight:
    """Rows under way to this rank."""

    def __init__(
        self,
        arrives: Tensor,
        parts: Mapping[int, slice],
        sends: Tensor,
        group: dist.ProcessGroup | None,
        work: dist.Work | None,
    ) -> None:
        self._arrives = arrives
        self._parts = parts
        self._sends: Tensor | None = sends  # must outlive the transfer
        self._group = group
        self._work = work

    def wait(self, rank: int) -> Tensor:
        """The rows that `rank` sent, [0, width] where it sent none."""
        if self._work is not None and self._group is not None:
            with stage("wait"):
                if self._arrives.device.type == "cpu":
                    finish(self._work, self._group)
                else:
                    self._work.wait()  # the stream waits, not this thread
            self._work, self._sends = None, None
        return self._arrives[self._parts.get(rank, slice(0, 0))]


def exchange(
    group: dist.ProcessGroup | None,
    sends: Mapping[int, Tensor],
    receives: Mapping[int, int],
    like: Tensor,
) -> Flight:
    """Post rows [rows, width] to ranks of the group and expect rows from others; both may be none.

    `like` tells width, dtype and device.  Collective over the group; with None nothing moves.
    """
    count = sum(receives.values())
    arrives = like.new_empty((count, like.shape[1]))
    parts, end = {}, 0
    for rank in sorted(receives):
        parts[rank] = slice(end, end + receives[rank])
        end += receives[rank]
    if group is None:
        assert not sends and not receives
        return Flight(arrives, parts, like, None, None)
    with stage("dispatch"):
        ranks = range(dist.get_world_size(group))
        packed = torch.cat([like[:0], *(sends[rank] for rank in sorted(sends))])
        work = dist.all_to_all_single(
            arrives,
            packed,
            [receives.get(rank, 0) for rank in ranks],
            [len(sends[rank]) if rank in sends else 0 for rank in ranks],
            group=group,
            async_op=True,
        )
    return Flight(arrives, parts, packed, group, work)
