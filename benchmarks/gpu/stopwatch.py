"""Where the host time of a layer goes: nested parts of the runtime, each with its own clock."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from libra.runtime import all_to_all, exchange, executor, kv_grad_reduce, microbatch

PARTS: tuple[tuple[str, Any, str], ...] = (
    ("microbatch", microbatch.Microbatch, "attend"),
    ("microbatch", microbatch.Microbatch, "attend_backward"),
    ("agree", microbatch, "reach_consensus"),
    ("executor", executor.Executor, "forward"),
    ("executor", executor.Executor, "backward"),
    *(
        ("rows", owner, name)
        for owner, names in (
            (exchange.Exchange, ("dispatch", "post_queries", "complete", "post_return")),
            (exchange.PendingOutput, ("finish",)),
            (kv_grad_reduce.KVGradReduce, ("collect", "send", "finish")),
        )
        for name in names
    ),
    ("wait", all_to_all.Transfer, "wait"),
)
"""(part, where it lives, its name)."""


class Stopwatch:
    """Seconds and calls of each part, and of the part without those inside it."""

    def __init__(self) -> None:
        self.own: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inside: list[float] = []

    def wrap(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed as `part`."""

        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            self._inside.append(0.0)
            begun = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                taken = time.perf_counter() - begun
                own = taken - self._inside.pop()
                if self._inside:
                    self._inside[-1] += taken
                self.own[part] = self.own.get(part, 0.0) + own
                self.calls[part] = self.calls.get(part, 0) + 1

        return timed

    @contextlib.contextmanager
    def watching(self, kernel: Any) -> Iterator[None]:
        """Time the runtime's parts and the calls of `kernel`, a wrapper made by `Watched`."""
        saved = [(owner, name, getattr(owner, name)) for _, owner, name in PARTS]
        for part, owner, name in PARTS:
            setattr(owner, name, self.wrap(part, getattr(owner, name)))
        kernel.watch = self
        try:
            yield
        finally:
            kernel.watch = None
            for owner, name, call in saved:
                setattr(owner, name, call)


class Watched:
    """A kernel whose calls a stopwatch may time, and that remembers the last ones."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.watch: Stopwatch | None = None
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def prepare(self, *args: Any) -> Any:
        """As the kernel."""
        return self._kernel.prepare(*args)

    def forward(self, *call: Any) -> None:
        """As the kernel."""
        self._run(self._kernel.forward, call)

    def backward(self, *call: Any) -> None:
        """As the kernel."""
        self._run(self._kernel.backward, call)

    def _run(self, run: Callable[..., None], call: tuple[Any, ...]) -> None:
        self.calls.append((run, call))
        timed = run if self.watch is None else self.watch.wrap("kernel", run)
        timed(*call)
