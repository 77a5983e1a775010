"""Real timings of one step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a scheme and rank; its threads are those of the rank: what attends, the network's, and
on a GPU the device's streams.  Ranks begin together, behind a barrier.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from libra.bench.measure import Place, barrier
from libra.bench.schemes import NAMES, Scheme

Event = dict[str, Any]

_BEGIN: Final = "bench::begin"
_PREFIXES: Final = ("libra::", "gloo:", "nccl")
_OPERATORS: Final = ("libra::attention", "libra::attention_backward")  # enclose all the others


def traced_step(run: Callable[[], None], place: Place) -> list[Event]:
    """Run one layer under the profiler; every rank's events, on all ranks.  Collective.

    An event has `rank`, `name`, `thread`, `device` (true where a GPU ran it), `start` and
    `seconds`; starts count from when the rank left the barrier.
    """
    activities = [ProfilerActivity.CPU]
    if place.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    barrier(place.device)
    with profile(activities=activities) as profiler:
        barrier(place.device)
        with record_function(_BEGIN):
            pass
        run()
    events = [each for each in profiler.events() or () if _wanted(each.name)]
    begins = [each.time_range.start for each in events if each.name == _BEGIN]
    mine = [
        {
            "rank": place.rank,
            "name": each.name,
            "thread": int(each.thread),
            "device": each.device_type != DeviceType.CPU,
            "start": (each.time_range.start - begins[0]) / 1e6,
            "seconds": (each.time_range.end - each.time_range.start) / 1e6,
        }
        for each in events
        if each.name != _BEGIN and each.time_range.start >= begins[0]
    ]
    return [event for text in _every_text(json.dumps(mine), place) for event in json.loads(text)]


def _wanted(name: str) -> bool:
    return name == _BEGIN or (name.startswith(_PREFIXES) and name not in _OPERATORS)


def _every_text(text: str, place: Place) -> Iterator[str]:
    """Each rank's text, as bytes of one size: nothing is unpickled."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(place.world)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    mine = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    mine[: len(data)] = data
    every = [torch.empty_like(mine) for _ in range(place.world)]
    dist.all_gather(every, mine)
    for size, padded in zip(sizes, every, strict=True):
        yield bytes(padded[: int(size)].numpy().astype(np.uint8)).decode()


def bench_trace(
    traced: Mapping[Scheme, Iterable[Event]], place: Place, about: dict[str, Any]
) -> dict[str, Any]:
    """The whole trace, ready for JSON; `about` goes along as its metadata."""
    events: list[Event] = []
    for row, (scheme, found) in enumerate(traced.items()):
        every = list(found)
        for rank in range(place.world):
            process = row * place.world + rank
            own = [event for event in every if event["rank"] == rank]
            name = f"{NAMES[scheme]}: rank {rank} (replica {rank // place.cp})"
            events += _metadata("process", process, 0, name, process)
            threads = _threads(own)
            for index, (thread, title) in enumerate(threads.items()):
                events += _metadata("thread", process, index, title, index)
                events += [
                    _complete(event, process, index)
                    for event in own
                    if (event["device"], event["thread"]) == thread
                ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _threads(events: Iterable[Event]) -> dict[tuple[bool, int], str]:
    """Threads that have events, each with a name for what it does, in order."""
    kinds: dict[tuple[bool, int], int] = {}
    for event in events:
        name = event["name"]
        kind = 0 if "attend" in name else 2 if name.startswith(("gloo:", "nccl")) else 1
        kind = 3 if event["device"] else kind
        thread = (event["device"], event["thread"])
        kinds[thread] = min(kind, kinds.get(thread, kind))
    words = ("attention", "rank", "network", "device stream")
    order = sorted(kinds, key=lambda thread: (kinds[thread], thread))
    return {thread: f"{words[kinds[thread]]} (thread {thread[1]})" for thread in order}


def _complete(event: Event, process: int, thread: int) -> Event:
    return {
        "name": event["name"].removeprefix("libra::"),
        "cat": event["name"].split(":")[0],
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": round(event["start"] * 1e6, 3),
        "dur": round(event["seconds"] * 1e6, 3),
    }


def _metadata(kind: str, process: int, thread: int, name: str, order: int) -> list[Event]:
    place = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**place, "name": f"{kind}_name", "args": {"name": name}},
        {**place, "name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]
