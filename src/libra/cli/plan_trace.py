"""A plan's modelled timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a worker with two threads, compute and network; one complete event for each piece of
work and each exchange.  The backward pass is shown as if it began when the last worker has finished
the forward pass.  The format is the Trace Event Format's JSON object form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from libra.cost.attention_time import PoolTimelines
from libra.cost.kernel_table import Direction
from libra.cost.timeline import Timeline, moved_bytes
from libra.plan.traffic import PoolTraffic

Event = dict[str, Any]
Ends = tuple[float, float]
"""Seconds from the start of a pass."""

COMPUTE, NETWORK = 0, 1
_DECIMALS = 3  # of microseconds


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass at its place in the trace."""

    direction: Direction
    line: Timeline
    begin: float
    """Seconds."""

    def event(
        self, kind: str, which: object, worker: int, thread: int, ends: Ends, **args: int
    ) -> Iterator[Event]:
        """One complete event, or none where it has no length."""
        # Both ends are rounded, so that neighbours still meet and never overlap.
        begin, stop = (round((self.begin + float(end)) * 1e6, _DECIMALS) for end in ends)
        prefix = "" if self.direction == "forward" else "backward "
        if stop > begin:
            yield {
                "name": f"{prefix}{kind} {which}",
                "cat": f"{kind},{self.direction}",
                "ph": "X",
                "pid": worker,
                "tid": thread,
                "ts": begin,
                "dur": round(stop - begin, _DECIMALS),
                "args": args,
            }


def plan_trace(lines: PoolTimelines, *, cp_size: int, about: dict[str, Any]) -> dict[str, Any]:
    """The whole trace, ready for JSON, with `about` as its metadata.

    Times are microseconds.  Work and exchanges without a length have no event.
    """
    events: list[Event] = []
    forward = _Pass("forward", lines.forward, 0.0)
    backward = _Pass("backward", lines.backward, lines.forward.makespan)
    for worker in range(len(lines.forward.local_end)):
        events += _names(worker, cp_size)
        for shown in (forward, backward):
            events += _work(worker, shown, lines.traffic)
            events += _exchanges(worker, shown, lines.traffic)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(worker: int, cp_size: int) -> Iterator[Event]:
    replica, rank = divmod(worker, cp_size)
    for name, thread, args in (
        ("process_name", 0, {"name": f"worker {worker} (replica {replica}, rank {rank})"}),
        ("process_sort_index", 0, {"sort_index": worker}),
        ("thread_name", COMPUTE, {"name": "compute"}),
        ("thread_name", NETWORK, {"name": "network"}),
    ):
        yield {"name": name, "ph": "M", "pid": worker, "tid": thread, "args": args}


def _work(worker: int, shown: _Pass, traffic: PoolTraffic) -> Iterator[Event]:
    line, pairs = shown.line, int(traffic.local_pairs[worker])
    yield from shown.event(
        "attend", "local", worker, COMPUTE, (0.0, line.local_end[worker]), pairs=pairs
    )
    for chunk in range(traffic.pairs.shape[1]):
        yield from shown.event(
            "attend",
            chunk,
            worker,
            COMPUTE,
            (line.attend_start[worker, chunk], line.attend_end[worker, chunk]),
            chunk=chunk,
            pairs=int(traffic.pairs[worker, chunk]),
        )


def _exchanges(worker: int, shown: _Pass, traffic: PoolTraffic) -> Iterator[Event]:
    line, (dispatched, returned) = shown.line, moved_bytes(traffic, shown.direction)
    for kind, moved, start, end in (
        ("dispatch", dispatched, line.dispatch_start, line.dispatch_end),
        ("return", returned, line.return_start, line.return_end),
    ):
        for chunk in range(len(moved)):
            yield from shown.event(
                kind,
                chunk,
                worker,
                NETWORK,
                (start[worker, chunk], end[worker, chunk]),
                chunk=chunk,
                bytes_sent=int(moved[chunk, worker].sum()),
                bytes_received=int(moved[chunk, :, worker].sum()),
            )
