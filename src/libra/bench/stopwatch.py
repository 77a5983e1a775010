"""Seconds that a kernel takes, apart from everything around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from libra.runtime.kernels.interface import AttentionCall, Kernel


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

    def prepare(self, segments: AttentionCall, device: torch.device) -> Any:
        """The kernel's own preparation."""
        return self._kernel.prepare(segments, device)

    def forward(
        self,
        q_TND: Tensor,
        k_TND: Tensor,
        v_TNE: Tensor,
        prepared: Any,
        scale: float,
        out_TNE: Tensor,
        lse: Tensor,
    ) -> None:
        """The kernel's forward, timed."""
        with self._timed(q_TND.device):
            self._kernel.forward(q_TND, k_TND, v_TNE, prepared, scale, out_TNE, lse)

    def backward(
        self,
        dout_TNE: Tensor,
        q_TND: Tensor,
        k_TND: Tensor,
        v_TNE: Tensor,
        out_TNE: Tensor,
        lse: Tensor,
        prepared: Any,
        scale: float,
        dq_TND: Tensor,
        dk_TND: Tensor,
        dv_TNE: Tensor,
    ) -> None:
        """The kernel's backward, timed."""
        with self._timed(q_TND.device):
            self._kernel.backward(
                *(dout_TNE, q_TND, k_TND, v_TNE, out_TNE, lse, prepared, scale),
                *(dq_TND, dk_TND, dv_TNE),
            )

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
