"""Time spent inside an attention call, forward and backward: on the wall, and on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Stopwatch:
    """Adds up the time between `start` and `stop`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        """Wall seconds, waits for other ranks included."""
        self.cpu_seconds = 0.0
        """Seconds this process computed: no waits, and none of what others do to a busy machine."""

    def start(self) -> None:
        self._started = time.perf_counter()
        self._cpu_started = time.process_time()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._started
        self.cpu_seconds += time.process_time() - self._cpu_started

    def timed(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The same attention, its forward and its backward timed by this watch.

        Two identity nodes enclose the call in the graph.  Autograd runs ready nodes latest-made
        first, so between them runs the backward of `attend` and nothing else, however many nodes
        that has.
        """

        def attend_timed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.start()
            inputs = _StopInBackward.apply(self, q, k, v)
            out: Tensor = _StartInBackward.apply(self, attend(*inputs))
            self.stop()
            return out

        return attend_timed


class _StartInBackward(torch.autograd.Function):
    """Identity after the call: its backward runs first."""

    @staticmethod
    def forward(ctx: Any, watch: Stopwatch, out: Tensor) -> Tensor:
        ctx.watch = watch
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        ctx.watch.start()
        return None, grad


class _StopInBackward(torch.autograd.Function):
    """Identity before the call: its backward runs when q, k and v all have their gradients."""

    @staticmethod
    def forward(ctx: Any, watch: Stopwatch, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.watch = watch
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.watch.stop()
        return None, *grads
