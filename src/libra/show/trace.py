"""A plan's modelled timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a worker with two threads, compute and network; one complete event for each piece of
work and each exchange.  The format is the Trace Event Format's JSON object form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from libra.plan.tally import PoolTally
from libra.plan.timeline import Timeline

Event = dict[str, Any]

COMPUTE, NETWORK = 0, 1
_DECIMALS = 3  # of microseconds


def plan_trace(
    timeline: Timeline, tally: PoolTally, *, cp_size: int, about: dict[str, Any]
) -> dict[str, Any]:
    """The whole trace, ready for JSON; `about` goes along as its metadata.

    Times are microseconds.  What has no length has no event.
    """
    events: list[Event] = []
    for worker in range(len(timeline.local_end)):
        events += _names(worker, cp_size)
        events += _work(worker, timeline, tally)
        events += _exchanges(worker, timeline, tally)
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


def _work(worker: int, line: Timeline, tally: PoolTally) -> Iterator[Event]:
    pairs = int(tally.local_pairs[worker])
    yield from _event("attend local", worker, COMPUTE, 0.0, line.local_end[worker], pairs=pairs)
    for chunk in range(tally.pairs.shape[1]):
        yield from _event(
            f"attend {chunk}",
            worker,
            COMPUTE,
            line.attend_start[worker, chunk],
            line.attend_end[worker, chunk],
            chunk=chunk,
            pairs=int(tally.pairs[worker, chunk]),
        )


def _exchanges(worker: int, line: Timeline, tally: PoolTally) -> Iterator[Event]:
    for kind, moved, start, end in (
        ("dispatch", tally.dispatched, line.dispatch_start, line.dispatch_end),
        ("return", tally.returned, line.return_start, line.return_end),
    ):
        for chunk in range(len(moved)):
            yield from _event(
                f"{kind} {chunk}",
                worker,
                NETWORK,
                start[worker, chunk],
                end[worker, chunk],
                chunk=chunk,
                bytes_sent=int(moved[chunk, worker].sum()),
                bytes_received=int(moved[chunk, :, worker].sum()),
            )


def _event(
    name: str, worker: int, thread: int, start: float, end: float, **args: int
) -> Iterator[Event]:
    # Both ends are rounded, so that neighbours still meet and never overlap.
    begin, stop = (round(float(seconds) * 1e6, _DECIMALS) for seconds in (start, end))
    if stop > begin:
        yield {
            "name": name,
            "cat": name.split()[0],
            "ph": "X",
            "pid": worker,
            "tid": thread,
            "ts": begin,
            "dur": round(stop - begin, _DECIMALS),
            "args": args,
        }
