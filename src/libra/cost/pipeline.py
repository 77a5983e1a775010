"""Pipeline schedules in time: GPipe, 1F1B and interleaved 1F1B.

    1F1B, 3 ranks, 4 microbatches               time ->
    rank 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3        F forward, B backward, . idle
    rank 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

A model chunk is a run of layers.  Chunk c runs on rank c % ranks: without interleaving there is
one a rank.  Every rank works through a fixed list of forwards and backwards, one at a time; an
operation starts when its rank is free and what it needs has arrived: a forward needs the forward of
the chunk before it, a backward the backward of the chunk after it, and the last chunk's backward
its own forward.

What is simplified.  A transfer takes a fixed time and occupies neither rank; forwards and backwards
are whole; the list's order never adapts to the times.  So the starts are longest paths in a fixed
graph, and nothing that grows can end anything sooner.

Orders: GPipe from Huang et al. 2019, 1F1B from Narayanan et al. 2019 (PipeDream) and 2021, where
interleaving is from as well ("Efficient Large-Scale Language Model Training on GPU Clusters").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.data.lengths import check_count

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
Seconds = NDArray[np.float64]


class Operation(NamedTuple):
    """One forward or backward of one model chunk and microbatch."""

    backward: bool
    chunk: int
    micro: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """When what runs, in seconds from the start.

    C chunks, M microbatches; further dimensions are independent pipelines, as they were given.
    """

    ranks: int
    """Pipeline ranks; chunk c runs on rank c % ranks."""
    order: tuple[tuple[Operation, ...], ...]
    """What each rank does, in order."""
    forward_start: Seconds
    """[C, M, ...], and so the others."""
    forward_end: Seconds
    backward_start: Seconds
    backward_end: Seconds

    @property
    def makespan(self) -> Seconds:
        """When the last operation ends, [...]."""
        return np.asarray(self.backward_end.max(axis=(0, 1)))

    @property
    def busy(self) -> Seconds:
        """Seconds each rank works, [ranks, ...]."""
        work = (self.forward_end - self.forward_start) + (self.backward_end - self.backward_start)
        chunks = work.sum(axis=1)
        return np.stack([chunks[rank :: self.ranks].sum(axis=0) for rank in range(self.ranks)])

    @property
    def bubble_share(self) -> Seconds:
        """Share of ranks x makespan in which a rank idles, [...]; 0 where nothing takes time."""
        whole = self.ranks * self.makespan
        idle = whole - self.busy.sum(axis=0)
        return np.asarray(np.divide(idle, whole, out=np.zeros_like(whole), where=whole > 0))

    @property
    def bubble_ratio(self) -> Seconds:
        """Idle time over work, [...]: the (p - 1) / m of the papers; 0 where nothing takes time."""
        work = self.busy.sum(axis=0)
        idle = self.ranks * self.makespan - work
        return np.asarray(np.divide(idle, work, out=np.zeros_like(work), where=work > 0))


def simulate_schedule(
    schedule: ScheduleName,
    forward_seconds: ArrayLike,
    backward_seconds: ArrayLike,
    *,
    ranks: int | None = None,
    hop_seconds: float = 0.0,
) -> Schedule:
    """Play a schedule.

    `forward_seconds` and `backward_seconds` [C, M, ...] are the seconds of chunk c and microbatch
    m, finite and >= 0; dimensions beyond are independent pipelines.  `ranks` is the number of
    pipeline ranks, by default C; it must divide C, and be C unless `schedule` is "interleaved".
    `hop_seconds` pass before the result of one rank reaches another.  Raises ValueError.
    """
    forward = _check_seconds("forward_seconds", forward_seconds)
    backward = _check_seconds("backward_seconds", backward_seconds)
    if forward.shape != backward.shape:
        raise ValueError(
            f"forward_seconds has shape {forward.shape} but backward_seconds {backward.shape}; "
            "both are [chunks, microbatches]"
        )
    hop = float(_check_seconds("hop_seconds", np.full((1, 1), hop_seconds))[0, 0])
    chunks, micros = forward.shape[:2]
    ranks = chunks if ranks is None else check_count("ranks", ranks)
    if chunks % ranks:
        raise ValueError(f"{chunks} model chunks over {ranks} ranks; ranks must divide the chunks")
    order = schedule_order(schedule, ranks, micros, virtual_stages=chunks // ranks)

    seconds = (forward, backward)
    start = (np.zeros_like(forward), np.zeros_like(forward))
    end = (np.zeros_like(forward), np.zeros_like(forward))
    done: set[Operation] = set()
    waiting = [0] * ranks  # the next operation of each rank
    free = [np.zeros(forward.shape[2:])] * ranks  # when each rank is free
    ready = deque(range(ranks))
    while ready:
        rank = ready.popleft()
        while waiting[rank] < len(order[rank]):
            operation = order[rank][waiting[rank]]
            before = needed(operation, chunks)
            if before is not None and before not in done:
                break
            begin = free[rank]
            if before is not None:
                arrived = end[before.backward][before.chunk, before.micro]
                begin = np.maximum(begin, arrived + (hop if before.chunk % ranks != rank else 0.0))
            at = (operation.chunk, operation.micro)
            start[operation.backward][at] = begin
            free[rank] = begin + seconds[operation.backward][at]
            end[operation.backward][at] = free[rank]
            done.add(operation)
            waiting[rank] += 1
            ready.extend({(operation.chunk + step) % ranks for step in (-1, 1)} - {rank})
    assert all(at == len(line) for at, line in zip(waiting, order, strict=True))
    return Schedule(
        ranks=ranks,
        order=order,
        forward_start=start[0],
        forward_end=end[0],
        backward_start=start[1],
        backward_end=end[1],
    )


def needed(operation: Operation, chunks: int) -> Operation | None:
    """The operation of another chunk (or the last chunk's forward) that must come first."""
    backward, chunk, micro = operation
    if not backward:
        return Operation(False, chunk - 1, micro) if chunk else None
    return (
        Operation(True, chunk + 1, micro) if chunk + 1 < chunks else Operation(False, chunk, micro)
    )


def schedule_order(
    schedule: ScheduleName, ranks: int, micros: int, *, virtual_stages: int = 1
) -> tuple[tuple[Operation, ...], ...]:
    """What each rank does, in order.  Raises ValueError for a schedule that cannot be.

    Interleaving wants microbatches in groups of `ranks`.
    """
    if schedule not in ("gpipe", "1f1b", "interleaved"):
        raise ValueError(f"schedule is {schedule!r}; choose one of 'gpipe', '1f1b', 'interleaved'")
    check_count("microbatches", micros)
    if schedule != "interleaved" and virtual_stages != 1:
        raise ValueError(
            f"schedule {schedule!r} has one model chunk a rank, not {virtual_stages}; choose "
            "'interleaved' or as many ranks as chunks"
        )
    if schedule == "interleaved" and micros % ranks:
        raise ValueError(
            f"{micros} microbatches over {ranks} ranks: an interleaved schedule needs a "
            "multiple of the ranks"
        )
    return tuple(
        _rank_order(schedule, rank, ranks, micros, virtual_stages) for rank in range(ranks)
    )


def most_in_flight(order: tuple[Operation, ...]) -> int:
    """Most forwards of one rank whose backward is still to come, counted in chunks."""
    steps = np.array([-1 if operation.backward else 1 for operation in order])
    return int(np.cumsum(steps).max())


def _rank_order(
    schedule: ScheduleName, rank: int, ranks: int, micros: int, virtual: int
) -> tuple[Operation, ...]:
    total = micros * virtual
    if schedule == "gpipe":
        warm_up = total
    elif schedule == "1f1b":
        warm_up = min(ranks - rank - 1, total)
    else:
        warm_up = min(2 * (ranks - rank - 1) + (virtual - 1) * ranks, total)
    # Interleaved: `ranks` microbatches of one chunk, then of the next; without, one chunk only.
    group = ranks if schedule == "interleaved" else micros
    forwards, backwards = [], []
    for number in range(total):
        turn, within = divmod(number, group * virtual)
        depth, place = divmod(within, group)
        micro = turn * group + place
        forwards.append(Operation(False, depth * ranks + rank, micro))
        backwards.append(Operation(True, (virtual - 1 - depth) * ranks + rank, micro))
    if schedule == "gpipe":
        backwards.reverse()  # the last microbatch is the first whose backward can start
    line = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        line += (forward, backward)
    return (*line, *backwards[total - warm_up :])


def _check_seconds(name: str, values: ArrayLike) -> Seconds:
    """`values` as float64; ValueError unless [chunks, microbatches, ...], finite and >= 0."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as an array of seconds: {error}") from error
    if array.ndim < 2 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}; it must be [chunks, microbatches]")
    wrong = np.argwhere(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise ValueError(f"{name}{list(at)} is {array[at]}; seconds are finite and >= 0")
    return array
