"""How fast this worker's kernels run: an online average of the executor's own kernel times.

A worker that is slower than its peers (a throttled GPU, an older board) shows in the time of its
kernels alone, transfers and waits left out.  So does one whose segments happen to be shorter than
others', which kernels run slower: the figures are for hardware that differs by more.  Planners
exchange these figures with each plan's metadata, so that every rank plans with the same ones.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from libra.data.lengths import causal_pairs
from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.interface import Buffers, Grads, Kernel

_KEEP: Final = 0.99
"""Share of the past that stays in the average at each kernel call: about the last hundred count."""

_GRAIN: Final = 0.02
"""Relative speeds are told apart in steps of this much, so that noise does not change plans."""


class SpeedMeter:
    """Query-key pairs times heads a second, averaged over the last kernel calls."""

    def __init__(self) -> None:
        self._pairs = 0.0
        self._seconds = 0.0
        self._pending: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def add(self, pairs: int, seconds: float) -> None:
        """Count one kernel call."""
        self._pairs = _KEEP * self._pairs + pairs
        self._seconds = _KEEP * self._seconds + seconds

    def add_events(self, pairs: int, start: torch.cuda.Event, stop: torch.cuda.Event) -> None:
        """Count a call on a GPU once both its events have passed; never waits for them."""
        self._pending.append((pairs, start, stop))
        while self._pending and self._pending[0][2].query():
            done, first, last = self._pending.popleft()
            self.add(done, first.elapsed_time(last) / 1e3)

    @property
    def reading(self) -> int:
        """Pairs times heads a millisecond, rounded; 0 before the first call."""
        pairs, seconds = self._pairs, self._seconds
        return round(pairs / seconds / 1e3) if seconds > 0 else 0


class MeasuredKernel:
    """A kernel whose forward calls are timed; otherwise the kernel itself.

    Backward calls are not timed: they run as much slower on every worker.
    """

    def __init__(self, kernel: Kernel, meter: SpeedMeter) -> None:
        self._kernel = kernel
        self._meter = meter

    def prepare(self, call: AttentionCall, device: torch.device) -> tuple[int, Any]:
        """The kernel's own preparation, with the pairs of the call."""
        pairs = causal_pairs(call.k_len - call.q_len, call.k_len)
        return int(pairs.sum()) * call.heads, self._kernel.prepare(call, device)

    def forward(self, prepared: tuple[int, Any], buffers: Buffers, scale: float) -> None:
        """The kernel's forward, timed."""
        pairs, inner = prepared
        if buffers.q.is_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._kernel.forward(inner, buffers, scale)
            stop.record()
            self._meter.add_events(pairs, start, stop)
            return
        begun = time.perf_counter()
        self._kernel.forward(inner, buffers, scale)
        self._meter.add(pairs, time.perf_counter() - begun)

    def backward(
        self, prepared: tuple[int, Any], buffers: Buffers, grads: Grads, scale: float
    ) -> None:
        """The kernel's backward."""
        self._kernel.backward(prepared[1], buffers, grads, scale)


def relative_speeds(readings: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Speeds relative to their mean, float64 [workers], from every worker's reading.

    None, for equal ones, until every worker has measured something.  Pure, so equal on all ranks
    that see the same readings.
    """
    if not (readings > 0).all():
        return None
    steps: NDArray[np.float64] = np.rint(readings / readings.mean() / _GRAIN)
    return np.maximum(steps, 1.0) * _GRAIN
