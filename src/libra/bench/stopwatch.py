"""Seconds that a kernel takes, apart from everything around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from libra.runtime.kernels.interface import AttentionCall, Buffers, Grads, Kernel


class TimedKernel:
    """A kernel that adds up the time of its calls; on a GPU by events, so that nothing waits."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = getattr(kernel, "name", "cpu")
        self._kernel = kernel
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def take(self) -> float:
        """Seconds since the last time; the device must be idle."""
        seconds = self._seconds
        for start, stop in self._events:
            seconds += start.elapsed_time(stop) / 1e3
        self._seconds, self._events = 0.0, []
        return seconds

    def prepare(self, call: AttentionCall, device: torch.device) -> Any:
        """The kernel's own preparation."""
        return self._kernel.prepare(call, device)

    def forward(self, prepared: Any, buffers: Buffers, scale: float) -> None:
        """The kernel's forward, timed."""
        with self._timed(buffers.q.device):
            self._kernel.forward(prepared, buffers, scale)

    def backward(self, prepared: Any, buffers: Buffers, grads: Grads, scale: float) -> None:
        """The kernel's backward, timed."""
        with self._timed(buffers.q.device):
            self._kernel.backward(prepared, buffers, grads, scale)

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._events.append((start, stop))
            return
        begin = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begin
