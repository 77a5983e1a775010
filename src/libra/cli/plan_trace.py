"""A plan's modelled timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A worker is a process with two threads, compute and network; every piece of work and every exchange
is one complete event.  The backward pass is shown as if it began when the last worker has finished
the forward pass.  The format is the Trace Event Format's JSON object form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from libra.cost.attention_time import PoolTimelines, Timeline, moved_bytes
from libra.cost.kernel_table import Direction
from libra.plan.traffic import PoolTraffic

Event = dict[str, Any]

COMPUTE, NETWORK = 0, 1
_DECIMALS = 3  # of microseconds


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
    for worker, kind, chunk, *ends, counts in _spans(direction, line, traffic):
        # Both ends are rounded, so that neighbours touch and never overlap.
        start, end = (round((begin + float(at)) * 1e6, _DECIMALS) for at in ends)
        if end > start:
            yield {
                "name": f"{prefix}{kind} {'local' if chunk is None else chunk}",
                "cat": f"{kind},{direction}",
                "ph": "X",
                "pid": worker,
                "tid": COMPUTE if kind == "attend" else NETWORK,
                "ts": start,
                "dur": round(end - start, _DECIMALS),
                "args": ({} if chunk is None else {"chunk": chunk}) | counts,
            }


def _spans(
    direction: Direction, line: Timeline, traffic: PoolTraffic
) -> Iterator[tuple[int, str, int | None, float, float, dict[str, int]]]:
    """Work and exchanges of a pass: worker, kind, chunk (None for the work that waits for none),
    start and end in seconds from the start of the pass, and counts.
    """
    dispatched, returned = moved_bytes(traffic, direction)
    exchanges = (("dispatch", line.dispatch, dispatched), ("return", line.returns, returned))
    for worker, chunks in enumerate(traffic.pairs.tolist()):
        local = {"pairs": int(traffic.local_pairs[worker])}
        yield worker, "attend", None, 0.0, line.local_end[worker], local
        for chunk, pairs in enumerate(chunks):
            start, end = (ends[worker, chunk] for ends in line.attend)
            yield worker, "attend", chunk, start, end, {"pairs": pairs}
            for kind, spans, moved in exchanges:
                # Row of the worker: bytes that it sends; its column: bytes that it receives.
                counts = {
                    "bytes_sent": int(moved[chunk, worker].sum()),
                    "bytes_received": int(moved[chunk, :, worker].sum()),
                }
                start, end = (ends[worker, chunk] for ends in spans)
                yield worker, kind, chunk, start, end, counts
