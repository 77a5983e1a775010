"""An attention function with both passes timed: on the wall, and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from libra.runtime.speed import Stopwatch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def timed(attend: Attend, watches: Iterable[Stopwatch]) -> Attend:
    """The same attention, timed by all `watches`.  It must be one node of the autograd graph."""

    def start(*_: Any) -> None:
        for watch in watches:
            watch.start(torch.device("cpu"))

    def stop(*_: Any) -> None:
        for watch in watches:
            watch.stop()

    def attend_timed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        start()
        out = attend(q, k, v)
        stop()
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(start)
            out.grad_fn.register_hook(stop)
        return out

    return attend_timed
