"""A plan's modelled timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A worker is a process with two threads, compute and network; every piece of work and every exchange
is one complete event.  The backward pass is shown as if it began when the last worker has finished
the forward pass.  The format is the Trace Event Format's JSON object form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from libra.cost.attention_time import PoolTimelines
from libra.cost.kernel_table import Direction
from libra.cost.timeline import Timeline, moved_bytes
from libra.plan.traffic import PoolTraffic

Event = dict[str, Any]

COMPUTE, NETWORK = 0, 1
_DECIMALS = 3  # of microseconds


class _Span(NamedTuple):
    """One piece of work or one exchange of a worker."""

    kind: str
    chunk: int | None
    """None for the work that waits for no chunk."""
    start: float
    """Seconds from the start of the pass, as `end`."""
    end: float
    counts: dict[str, int]


def plan_trace(lines: PoolTimelines, *, cp_size: int, about: dict[str, Any]) -> dict[str, Any]:
    """The whole trace, ready for JSON, with `about` as its metadata.

    Times are microseconds.  Work and exchanges without a length have no event.
    """
    events: list[Event] = []
    # Metadata events name processes and threads and keep workers in order.
    for worker in range(len(lines.forward.local_end)):
        replica, rank = divmod(worker, cp_size)
        for name, thread, args in (
            ("process_name", 0, {"name": f"worker {worker} (replica {replica}, rank {rank})"}),
            ("process_sort_index", 0, {"sort_index": worker}),
            ("thread_name", COMPUTE, {"name": "compute"}),
            ("thread_name", NETWORK, {"name": "network"}),
        ):
            events.append({"name": name, "ph": "M", "pid": worker, "tid": thread, "args": args})
    events += _events("forward", lines.forward, lines.traffic, begin=0.0)
    events += _events("backward", lines.backward, lines.traffic, begin=lines.forward.makespan)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _events(
    direction: Direction, line: Timeline, traffic: PoolTraffic, *, begin: float
) -> Iterator[Event]:
    """Complete events of a pass that begins at `begin` seconds."""
    prefix = "" if direction == "forward" else "backward "
    moved = moved_bytes(traffic, direction)
    for worker in range(len(line.local_end)):
        for span in _spans(worker, line, traffic, moved):
            # Both ends are rounded, so that neighbours touch and never overlap.
            start, end = (
                round((begin + float(at)) * 1e6, _DECIMALS) for at in (span.start, span.end)
            )
            if end > start:
                chunk = {} if span.chunk is None else {"chunk": span.chunk}
                yield {
                    "name": f"{prefix}{span.kind} {'local' if span.chunk is None else span.chunk}",
                    "cat": f"{span.kind},{direction}",
                    "ph": "X",
                    "pid": worker,
                    "tid": COMPUTE if span.kind == "attend" else NETWORK,
                    "ts": start,
                    "dur": round(end - start, _DECIMALS),
                    "args": chunk | span.counts,
                }


def _spans(
    worker: int, line: Timeline, traffic: PoolTraffic, moved: tuple[Any, Any]
) -> Iterator[_Span]:
    """Work and exchanges of a worker in one pass; `moved` are the bytes of both exchanges."""
    pairs = int(traffic.local_pairs[worker])
    yield _Span("attend", None, 0.0, line.local_end[worker], {"pairs": pairs})
    for chunk, pairs in enumerate(traffic.pairs[worker].tolist()):
        at = (worker, chunk)
        yield _Span("attend", chunk, line.attend.start[at], line.attend.end[at], {"pairs": pairs})
        # Row of the worker: bytes that it sends; its column: bytes that it receives.
        dispatch, back = (
            {
                "bytes_sent": int(way[chunk, worker].sum()),
                "bytes_received": int(way[chunk, :, worker].sum()),
            }
            for way in moved
        )
        yield _Span("dispatch", chunk, line.dispatch.start[at], line.dispatch.end[at], dispatch)
        yield _Span("return", chunk, line.returns.start[at], line.returns.end[at], back)
