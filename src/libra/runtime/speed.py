"""Speed of this worker's kernels: one stopwatch, a kernel that it times, and a running average.

A worker that is slower than its peers (a throttled GPU, an older board) shows in the time of its
kernels alone, without transfers and waits.  A worker whose segments are shorter than others' looks
slower too, because kernels are slower on them, so the average serves for hardware that differs by
more than that.  Planners exchange their readings with each plan's metadata, and every rank plans
with the same ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.interface import Buffers, Grads, Kernel

_KEEP: Final = 0.99
"""Share of the past that stays in the average at each kernel call: about the last hundred count."""

_GRAIN: Final = 0.02
"""Step to which relative speeds are rounded, so that noise does not change plans."""


class Stopwatch:
    """Times calls, on a GPU by events, so that nothing waits, and else by `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.perf_counter
        self._begun: float | torch.cuda.Event = 0.0
        self._events: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._finished: deque[tuple[int, float]] = deque()

    def start(self, device: torch.device) -> None:
        """Begin a call."""
        if device.type != "cuda":
            self._begun = self._clock()
            return
        self._begun = torch.cuda.Event(enable_timing=True)
        self._begun.record()

    def stop(self, pairs: int = 0) -> None:
        """End it.  `pairs` comes back with its time."""
        if isinstance(self._begun, float):
            self._finished.append((pairs, self._clock() - self._begun))
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._events.append((pairs, self._begun, end))

    def finished(self) -> Iterator[tuple[int, float]]:
        """(pairs, seconds) of each call that the device has ended, once.  Never waits."""
        # Calls of one stream end in their order: if the first has not ended, no later one has.
        while self._events and self._events[0][2].query():
            pairs, begun, ended = self._events.popleft()
            self._finished.append((pairs, begun.elapsed_time(ended) / 1e3))
        while self._finished:
            yield self._finished.popleft()

    def total(self) -> float:
        """Seconds of all finished calls since the last time; all are, once the device is idle."""
        return sum(seconds for _, seconds in self.finished())


class TimedKernel:
    """A kernel whose calls a stopwatch times, with query-key pairs times heads as their `pairs`."""

    def __init__(self, kernel: Kernel, watch: Stopwatch, *, backward: bool = True) -> None:
        self.name = kernel.name
        self.watch = watch
        self._kernel = kernel
        self._backward = backward

    def prepare(self, call: AttentionCall, device: torch.device) -> tuple[int, Any]:
        """The kernel's own preparation, with the pairs of the call."""
        return call.pairs, self._kernel.prepare(call, device)

    def forward(self, prepared: tuple[int, Any], buffers: Buffers, scale: float) -> None:
        """The kernel's forward, timed."""
        self._timed(self._kernel.forward, prepared, buffers, scale)

    def backward(
        self, prepared: tuple[int, Any], buffers: Buffers, grads: Grads, scale: float
    ) -> None:
        """The kernel's backward, timed if asked for."""
        if self._backward:
            self._timed(self._kernel.backward, prepared, buffers, grads, scale)
        else:
            self._kernel.backward(prepared[1], buffers, grads, scale)

    def _timed(
        self, run: Callable[..., None], prepared: tuple[int, Any], buffers: Buffers, *rest: Any
    ) -> None:
        pairs, inner = prepared
        self.watch.start(buffers.q.device)
        run(inner, buffers, *rest)
        self.watch.stop(pairs)


class SpeedMeter:
    """Query-key pairs times heads a second, averaged over the last forward calls.

    Backward calls are not timed: they are slower by the same factor on every worker.
    """

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._pairs, self._seconds = 0.0, 0.0

    def timed(self, kernel: Kernel) -> TimedKernel:
        """`kernel`, measured by this meter."""
        return TimedKernel(kernel, self._watch, backward=False)

    def add(self, pairs: int, seconds: float) -> None:
        """Count one kernel call."""
        # Pairs and seconds fade alike, so a long call counts as much as its work.
        self._pairs = _KEEP * self._pairs + pairs
        self._seconds = _KEEP * self._seconds + seconds

    @property
    def reading(self) -> int:
        """Pairs times heads a millisecond, rounded; 0 before the first call."""
        for pairs, seconds in self._watch.finished():
            self.add(pairs, seconds)
        return round(self._pairs / self._seconds / 1e3) if self._seconds > 0 else 0


def relative_speeds(readings: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Speeds relative to their mean, float64 [workers], from every worker's reading.

    None, which means equal speeds, until every worker has measured a call.  Pure, so equal on all
    ranks that have the same readings.
    """
    if not (readings > 0).all():
        return None
    # A worker below half a step gets a whole one, or its speed would be 0.
    steps: NDArray[np.float64] = np.rint(readings / readings.mean() / _GRAIN)
    return np.maximum(steps, 1.0) * _GRAIN


def synchronise(device: torch.device) -> None:
    """Wait until a GPU is idle; a CPU always is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
