"""Meters what one rank really hands to the network and what it holds meanwhile, message by message.

The executor's two ways to move rows are wrapped, and the collective beneath them: bytes are those
of the tensors that the collective is given, not of anything planned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from libra.runtime.all_to_all import DeviceAllToAll
from libra.runtime.executor import Executor

Step = tuple[str, str]
"""Pass and way: ("forward", "dispatch"), ("backward", "return")."""


@dataclass
class Meter:
    """What was metered so far."""

    sent: dict[Step, list[list[int]]] = field(default_factory=dict)
    """Bytes to each worker of every message, in the order of posting."""
    received: dict[Step, list[list[int]]] = field(default_factory=dict)
    exchanges: int = 0
    """All-to-alls."""
    kept: int = 0
    """Bytes that forwards keep for their backwards: fetched rows, outputs computed for others."""


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """Meter the attention calls of this process."""
    meter = Meter()
    passing: list[str] = []
    message: list[tuple[list[int], list[int]]] = []
    all_to_all = dist.all_to_all_single

    def count(into: torch.Tensor, rows: torch.Tensor, *splits: list[int], **options: Any) -> Any:
        assert message, "rows travel outside the executor's messages"
        (sent, received), (from_each, to_each) = message[-1], splits
        assert not any(sent) and not any(received), "one all-to-all a message"
        for totals, tensor, counts in ((sent, rows, to_each), (received, into, from_each)):
            assert sum(counts) == len(tensor) and tensor.dim() == 2
            row = tensor.shape[1] * tensor.element_size()
            totals[:] = [count * row for count in counts]
        meter.exchanges += 1
        return all_to_all(into, rows, *splits, **options)

    def moving(way: str, move: Any) -> Any:
        def moved(wanted: Any, *arguments: Any) -> Any:
            workers = len(wanted.send_splits)
            message.append(([0] * workers, [0] * workers))
            flight = move(wanted, *arguments)
            for totals, counts in zip((meter.sent, meter.received), message.pop(), strict=True):
                totals.setdefault((passing[-1], way), []).append(counts)
            return flight

        return moved

    def passed(name: str, run: Any) -> Any:
        def ran(*arguments: Any, **options: Any) -> Any:
            passing.append(name)
            result = run(*arguments, **options)
            passing.pop()
            if name == "forward":
                meter.kept += result.peer_out.nbytes + result.fetched.nbytes
            return result

        return ran

    with contextlib.ExitStack() as stack:
        for owner, name, wrapped in (
            (dist, "all_to_all_single", count),
            (DeviceAllToAll, "send", moving("dispatch", DeviceAllToAll.send)),
            (DeviceAllToAll, "send_back", moving("return", DeviceAllToAll.send_back)),
            (Executor, "forward", passed("forward", Executor.forward)),
            (Executor, "backward", passed("backward", Executor.backward)),
        ):
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield meter
