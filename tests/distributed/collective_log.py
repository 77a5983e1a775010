"""Records every collective that a rank issues, in order, for comparison between ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter_tensor",
)


@dataclass(frozen=True)
class Call:
    """One collective."""

    name: str
    ranks: tuple[int, ...]
    """Who takes part."""


@dataclass(frozen=True)
class Log:
    """What the calling thread and the planner thread issued: between the two there is no order."""

    calls: list[Call] = field(default_factory=list)
    planning: list[Call] = field(default_factory=list)

    @property
    def exchanges(self) -> int:
        """All-to-alls so far."""
        return sum(call.name == "all_to_all_single" for call in self.calls)


@contextlib.contextmanager
def recorded() -> Iterator[Log]:
    """Record the collectives of this process."""
    log = Log()
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(
                mock.patch.object(dist, name, _recording(name, getattr(dist, name), log))
            )
        yield log


def _recording(name: str, function: Any, log: Log) -> Any:
    def record(*args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> Any:
        call = Call(name, tuple(dist.get_process_group_ranks(group)))
        planning = threading.current_thread().name == "libra-planner"
        (log.planning if planning else log.calls).append(call)
        return function(*args, group=group, **kwargs)

    return record
