"""A model of one pass in time, forward or backward: who dispatches, attends and returns, and when.

    network   | dispatch 0 | dispatch 1 | dispatch 2 |       | return 0 | return 1 | return 2 |
    compute   | local work .......| attend 0 | attend 1 | attend 2 |
              0                                                                      makespan

The order is the executor's in both passes: all dispatches are posted at once, in chunk order; work
that waits for nothing runs first; then chunk by chunk a worker waits for its dispatch, attends, and
posts the return, which queues behind what its network still has to do.  Backward dispatches dO
(and Q, K and V where they are fetched again) and returns dQ, and dK and dV with the last chunk that
adds to them.  A dispatch ends with what relays pass on, each once its own part has come; dK and dV
go to relays before they return.

What is simplified.  An exchange takes a worker as long as its busiest link needs for its own bytes
(in or out, within its node or between nodes; links work side by side) and a fixed latency: no
congestion elsewhere, one latency for all that a chunk moves one way.  It begins when the worker and
all who send to it have reached it; a receiver that is late holds nobody up, as the executor posts
the returns of workers that compute nothing for others early.  Attention runs at one rate, whatever
the shape of its segments, unless its seconds are given, and at full speed beside the transfers;
packing rows is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape
from libra.data.lengths import check_count
from libra.plan.traffic import PoolTraffic

IntArray = NDArray[np.int64]
Seconds = NDArray[np.float64]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Rates of the machine.  The defaults describe an H100 SXM node; measure yours."""

    flops_per_second: float = 0.6 * 989e12
    """Attention FLOP/s of one worker.  Default: 0.6 of the 989 TFLOP/s dense bf16 peak (NVIDIA H100
    SXM data sheet); the FlashAttention-3 paper reports up to 0.75 of it on long sequences.
    """

    within_node: float = 450e9
    """Bytes/s a worker sends, and receives, inside its node.  Default: NVLink 4, 900 GB/s for both
    directions together (the same data sheet).
    """

    between_nodes: float = 50e9
    """Bytes/s a worker sends, and receives, across nodes.  Default: one 400 Gb/s network card for
    each GPU, as in a DGX H100.
    """

    latency_seconds: float = 30e-6
    """Fixed time of one all-to-all.  Default: an assumption, of the order of a small all-to-all
    over a few nodes.
    """

    ranks_per_node: int = 8
    """Neighbouring workers that share a node; the pool's worker 0 is the first of its node."""

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "within_node", "between_nodes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"TimeModel.{name} is {value!r}; it must be finite and > 0")
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ValueError(
                f"TimeModel.latency_seconds is {self.latency_seconds!r}; it must be finite and >= 0"
            )
        check_count("TimeModel.ranks_per_node", self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """When each worker does what, in seconds from the start; float64 [workers, chunks] each.

    Work or exchanges that do not exist have no length.
    """

    local_end: Seconds
    """End of the work that waits for nothing, which starts at 0, [workers]."""
    dispatch_start: Seconds
    dispatch_end: Seconds
    attend_start: Seconds
    attend_end: Seconds
    return_start: Seconds
    return_end: Seconds

    @property
    def compute(self) -> Seconds:
        """Seconds each worker computes, [workers]."""
        return np.asarray(self.local_end + (self.attend_end - self.attend_start).sum(axis=1))

    @property
    def finish(self) -> Seconds:
        """When each worker has attended its tiles and has all its outputs, [workers]."""
        # A return, even an empty one, follows its attend.
        return np.asarray(self.return_end[:, -1])

    @property
    def exposed(self) -> Seconds:
        """Seconds until its finish in which each worker does not compute, [workers]."""
        return self.finish - self.compute

    @property
    def makespan(self) -> float:
        """When the last worker finishes."""
        return float(self.finish.max())


def pool_timeline(
    traffic: PoolTraffic,
    heads: HeadShape,
    model: TimeModel,
    *,
    direction: Direction = "forward",
    attend: tuple[Seconds, Seconds] | None = None,
) -> Timeline:
    """Play the executor's pipeline of one pass over a pool's counts.

    `attend` gives the seconds of each worker's local work [workers] and of its chunks [workers,
    chunks], say from measured kernels; None takes the model's one rate.  Pure; longer transfers or
    slower work never end anything sooner, for all is sums and maxima.

    Raises ValueError for another direction, and for seconds of another shape, negative or not
    finite.
    """
    dispatched, returned = hops(traffic, direction)
    if attend is None:
        rate = pair_flops(heads, direction) / model.flops_per_second
        attend = traffic.local_pairs * np.float64(rate), traffic.pairs * np.float64(rate)
    local, chunks = _checked(attend, traffic)
    empty = np.zeros_like(chunks)
    line = Timeline(
        local_end=local,
        dispatch_start=empty.copy(),
        dispatch_end=empty.copy(),
        attend_start=empty.copy(),
        attend_end=empty.copy(),
        return_start=empty.copy(),
        return_end=empty.copy(),
    )
    network = np.zeros_like(local)  # when each worker's network is next free
    dispatching = [_durations(moved, model) for moved in dispatched]
    returning = [_durations(moved, model) for moved in returned]
    for chunk in range(chunks.shape[1]):
        start, network = _travel(network, dispatched, dispatching, chunk)
        line.dispatch_start[:, chunk], line.dispatch_end[:, chunk] = start, network
    gpu = line.local_end
    for chunk in range(chunks.shape[1]):
        line.attend_start[:, chunk] = np.maximum(gpu, line.dispatch_end[:, chunk])
        gpu = line.attend_start[:, chunk] + chunks[:, chunk]
        line.attend_end[:, chunk] = gpu
    for chunk in range(chunks.shape[1]):
        ready = np.maximum(network, line.attend_end[:, chunk])
        start, network = _travel(ready, returned, returning, chunk)
        line.return_start[:, chunk], line.return_end[:, chunk] = start, network
    return line


def pair_flops(heads: HeadShape, direction: Direction) -> int:
    """FLOPs of one query-key pair of one head: a multiplication and an addition an element.

    Forward two products, Q K and P V.  Backward five, 2.5 times as much where keys and values are
    equally wide: Q K again, dO V, P dO for dV, and dS with K for dQ and with Q for dK.
    """
    if direction == "forward":
        return 2 * (heads.dim + heads.value_dim)
    return 2 * (3 * heads.dim + 2 * heads.value_dim)


def moved_bytes(traffic: PoolTraffic, direction: Direction) -> tuple[IntArray, IntArray]:
    """What a pass dispatches and returns, int64 [chunks, workers, workers] each."""
    dispatched, returned = hops(traffic, direction)
    return np.sum(dispatched, axis=0), np.sum(returned, axis=0)


def hops(traffic: PoolTraffic, direction: Direction) -> tuple[list[IntArray], list[IntArray]]:
    """The exchanges of each chunk's dispatch and of its return, one after the other; int64 [chunks,
    workers, workers] each.
    """
    if direction == "forward":
        return [traffic.dispatched, traffic.relayed], [traffic.returned]
    if direction == "backward":
        return (
            [traffic.backward_dispatched, traffic.backward_relayed],
            [traffic.backward_collected, traffic.backward_returned],
        )
    raise ValueError(f"direction is {direction!r}; choose 'forward' or 'backward'")


def _checked(attend: tuple[Seconds, Seconds], traffic: PoolTraffic) -> tuple[Seconds, Seconds]:
    local, chunks = (np.asarray(seconds, dtype=np.float64) for seconds in attend)
    workers, count = traffic.pairs.shape
    if local.shape != (workers,) or chunks.shape != (workers, count):
        raise ValueError(
            f"attend has shapes {local.shape} and {chunks.shape}; this pool needs seconds of "
            f"{workers} workers' local work, [{workers}], and of their chunks, [{workers}, {count}]"
        )
    for seconds in (local, chunks):
        if not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise ValueError("attend holds seconds that are negative or not finite")
    return local, chunks


def _durations(moved: IntArray, model: TimeModel) -> Seconds:
    """Seconds each worker spends on each chunk's exchange, [workers, chunks]; 0 where none is."""
    chunks, workers, _ = moved.shape
    node = np.arange(workers) // model.ranks_per_node
    near = node[:, None] == node[None, :]
    seconds = np.zeros((chunks, workers), dtype=np.float64)
    for link, bandwidth in ((near, model.within_node), (~near, model.between_nodes)):
        through = np.where(link, moved, 0)
        busiest = np.maximum(through.sum(axis=1), through.sum(axis=2))
        seconds = np.maximum(seconds, busiest / bandwidth)
    latency = np.where(moved.reshape(chunks, -1).any(axis=1), model.latency_seconds, 0.0)
    return np.asarray((seconds + latency[:, None]).T)


def _travel(
    ready: Seconds, moved: list[IntArray], seconds: list[Seconds], chunk: int
) -> tuple[Seconds, Seconds]:
    """When a chunk's exchanges, one after the other, begin and have ended for each worker,
    [workers] each.
    """
    start = None
    for hop, lasts in zip(moved, seconds, strict=True):
        if hop[chunk].any():
            begin = _begin(ready, hop[chunk])
            start, ready = begin if start is None else start, begin + lasts[:, chunk]
    return ready if start is None else start, ready


def _begin(ready: Seconds, moved: IntArray) -> Seconds:
    """When an exchange begins for each worker, given when each reaches it, [workers]."""
    senders = np.where(moved > 0, ready[:, None], 0)
    return np.asarray(np.maximum(ready, senders.max(axis=0)))
