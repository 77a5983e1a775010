"""Pipeline schedules in time: GPipe, 1F1B and interleaved 1F1B.

    1F1B, 3 ranks, 4 microbatches               time ->
    rank 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3        F forward, B backward, . idle
    rank 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

A model chunk is a run of layers.  Chunk c runs on rank c % ranks: without interleaving every rank
has one chunk.  Every rank works through a fixed list of forwards and backwards, one at a time.  An
operation starts when its rank is free and its input has arrived: a forward needs the forward of the
chunk before it, a backward the backward of the chunk after it, and the last chunk's backward its
own forward.

Simplifications.  A transfer takes a fixed time and occupies neither rank; forwards and backwards
are never split; the order of the list does not adapt to the times.  So the starts are longest paths
in a fixed graph, and a longer operation never makes another end sooner.

Orders: GPipe from Huang et al. 2019, 1F1B from Narayanan et al. 2019 (PipeDream) and 2021, which
also introduced interleaving ("Efficient Large-Scale Language Model Training on GPU Clusters").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from libra.config import check_choice, check_count, check_number
from libra.cost.arrays import Seconds, check_array

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]


class Operation(NamedTuple):
    """One forward or backward of one model chunk and microbatch."""

    backward: int
    """0 for a forward, 1 for a backward."""
    chunk: int
    micro: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Start and end of every operation, in seconds.

    C chunks, M microbatches; further dimensions are independent pipelines, as they were given.
    """

    ranks: int
    """Pipeline ranks; chunk c runs on rank c % ranks."""
    order: tuple[tuple[Operation, ...], ...]
    """Operations of each rank, in order."""
    start: Seconds
    """[2, C, M, ...], forwards first."""
    end: Seconds
    """The same shape."""

    @property
    def makespan(self) -> Seconds:
        """When the last operation ends, [...]."""
        return np.asarray(self.end.max(axis=(0, 1, 2)))

    @property
    def busy(self) -> Seconds:
        """Seconds each rank works, [ranks, ...]."""
        forward, backward = self.end - self.start
        chunks = (forward + backward).sum(axis=1)
        return np.stack([chunks[rank :: self.ranks].sum(axis=0) for rank in range(self.ranks)])

    @property
    def bubble_share(self) -> Seconds:
        """Share of ranks x makespan in which a rank idles, [...]; 0 where nothing takes time."""
        whole = self.ranks * self.makespan
        idle = whole - self.busy.sum(axis=0)
        return np.asarray(np.divide(idle, whole, out=np.zeros_like(whole), where=whole > 0))


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
    forward = check_array("forward_seconds", forward_seconds)
    if forward.ndim < 2 or not forward.size:
        raise ValueError(
            f"forward_seconds has shape {forward.shape}; it must be [chunks, microbatches]"
        )
    backward = check_array(
        "backward_seconds", backward_seconds, shape=forward.shape, shape_from="forward_seconds"
    )
    check_number("hop_seconds", hop_seconds, zero=True)
    chunks, micros = forward.shape[:2]
    ranks = chunks if ranks is None else check_count("ranks", ranks)
    if chunks % ranks:
        raise ValueError(f"{chunks} model chunks over {ranks} ranks; ranks must divide the chunks")
    order = schedule_order(schedule, ranks, micros, virtual_stages=chunks // ranks)

    # An operation has its place in arrays [2, chunks, microbatches]: forwards first.
    # Play the lists round and round: each rank goes as far as its inputs are there.
    seconds = np.stack([forward, backward])
    start, end = np.zeros_like(seconds), np.zeros_like(seconds)
    done: set[Operation] = set()
    free = [np.zeros(forward.shape[2:])] * ranks  # when each rank is free
    waiting = [deque(line) for line in order]
    while any(waiting):
        played = len(done)
        for rank, line in enumerate(waiting):
            while line and ((before := needed(line[0], chunks)) is None or before in done):
                operation = line.popleft()
                begin = free[rank]
                if before is not None:
                    # Neighbouring chunks on one rank (interleaving on one rank) need no transfer.
                    travel = hop_seconds if before.chunk % ranks != rank else 0.0
                    begin = np.maximum(begin, end[before] + travel)
                start[operation] = begin
                end[operation] = free[rank] = begin + seconds[operation]
                done.add(operation)
        assert len(done) > played, "the schedule's order has a deadlock"
    return Schedule(ranks=ranks, order=order, start=start, end=end)


def needed(operation: Operation, chunks: int) -> Operation | None:
    """The operation of another chunk (or the last chunk's forward) that must come first."""
    backward, chunk, micro = operation
    if not backward:
        return Operation(0, chunk - 1, micro) if chunk else None
    return Operation(1, chunk + 1, micro) if chunk + 1 < chunks else Operation(0, chunk, micro)


def schedule_order(
    schedule: ScheduleName, ranks: int, micros: int, *, virtual_stages: int = 1
) -> tuple[tuple[Operation, ...], ...]:
    """Operations of each rank, in order.  Raises ValueError as `check_schedule` does."""
    check_schedule(schedule, ranks, micros, virtual_stages)
    return tuple(
        _rank_order(schedule, rank, ranks, micros, virtual_stages) for rank in range(ranks)
    )


def check_schedule(schedule: ScheduleName, ranks: int, micros: int, virtual_stages: int) -> None:
    """ValueError for an unknown schedule, several chunks a rank without interleaving, and
    interleaving where `ranks` does not divide the microbatches.
    """
    check_choice("schedule", schedule, get_args(ScheduleName))
    check_count("microbatches", micros)
    if schedule != "interleaved" and virtual_stages != 1:
        raise ValueError(
            f"virtual_stages is {virtual_stages}, but schedule {schedule!r} has one model chunk a "
            "rank; set schedule='interleaved' or virtual_stages=1"
        )
    if schedule == "interleaved" and micros % ranks:
        raise ValueError(
            f"pp {ranks} does not divide the {micros} microbatches of a replica (global_batch / "
            "dp), which schedule='interleaved' needs"
        )


def most_in_flight(order: tuple[Operation, ...]) -> int:
    """Most forwards of one rank whose backward is still to come, counted in chunks."""
    steps = np.array([-1 if operation.backward else 1 for operation in order])
    return int(np.cumsum(steps).max())


def _rank_order(
    schedule: ScheduleName, rank: int, ranks: int, micros: int, virtual: int
) -> tuple[Operation, ...]:
    # Step 1: forwards of the warm-up.  1F1B fills the stages behind this rank; with interleaving
    # also all chunks of the rank but the last.
    total, behind = micros * virtual, ranks - rank - 1
    most = {"gpipe": total, "1f1b": behind, "interleaved": 2 * behind + (virtual - 1) * ranks}
    warm_up = min(most[schedule], total)
    # Step 2: the order of forwards and of backwards.
    # Interleaved: `ranks` microbatches of one chunk, then of the next; without, one chunk only.
    # For example 2 ranks with 2 chunks each and 4 microbatches: rank 0 runs chunks 0 and 2 in the
    # order F(0,0) F(0,1) F(2,0) F(2,1) F(0,2) F(0,3) F(2,2) F(2,3), as (chunk, microbatch).
    group = ranks if schedule == "interleaved" else micros
    forwards, backwards = [], []
    for number in range(total):
        turn, within = divmod(number, group * virtual)
        depth, place = divmod(within, group)
        micro = turn * group + place
        forwards.append(Operation(0, depth * ranks + rank, micro))
        backwards.append(Operation(1, (virtual - 1 - depth) * ranks + rank, micro))
    if schedule == "gpipe":
        backwards.reverse()  # the last microbatch is the first whose backward can start
    # Step 3: after the warm-up one forward and one backward alternate, then backwards remain.
    line = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        line += (forward, backward)
    return (*line, *backwards[total - warm_up :])
