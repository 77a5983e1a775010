"""What a rank did and when, and what of its transfers was exposed.

    dispatch | 0  |  1  |  2  |  3  |                      return | 0 | 1 | 2 |  3  |
    computing worker: local | first wait | 0 | wait | 1 | wait | 2 | wait | 3 |  last wait  |

Clocks of all ranks are one clock: they run on one machine.  A transfer is *exposed* as far as the
worker that computes waits for it, or, for returned rows, as far as it ends after the last kernel.
The first dispatch and the last return are the two ends; everything between is the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SENT, RETURNED = "send", "send_back"
"""Kinds of posts, named as the methods of `DeviceAllToAll` that post them."""


@dataclass(frozen=True, slots=True)
class Post:
    """A nonblocking all-to-all as one rank posted it."""

    kind: str
    """`SENT` or `RETURNED`."""
    at: float
    sent: int
    """Bytes to other ranks."""
    received: int
    """Bytes from other ranks."""


@dataclass(frozen=True, slots=True)
class RankEvents:
    """One pass on one rank; seconds of the clock that all ranks share."""

    start: float
    end: float
    posts: list[Post]
    """In the order in which every rank posts them."""
    waits: dict[int, tuple[float, float]]
    """Begin and end of the wait for each post, by its place in `posts`."""
    kernels: list[tuple[float, float]]
    main_cpu: float = 0.0
    """CPU seconds of the thread that computes, and of all other threads (gloo's) together."""
    other_cpu: float = 0.0
    main_delay: float = 0.0
    """Seconds these threads were ready to run and had no CPU."""
    other_delay: float = 0.0

    @property
    def attended(self) -> float:
        """Seconds in kernels."""
        return sum(stop - start for start, stop in self.kernels)

    @property
    def last_kernel(self) -> float:
        """End of the last kernel."""
        return self.kernels[-1][1] if self.kernels else self.start


@dataclass(frozen=True, slots=True)
class Exposure:
    """Seconds of one pass of a pool."""

    step: float
    """From the last rank's start to the last rank's end."""
    attended: float
    """In kernels, on the worker to which most is dispatched."""
    first: float
    """That worker's waiting for the first chunk's dispatch."""
    middle: float
    """Its waiting for the other chunks' dispatch, and from the end of all workers' kernels to the
    arrival of the returns that were posted before its last kernel ended."""
    last: float
    """From there to the arrival of the last returns."""
    uneven: float
    """From the end of its kernels to the end of all workers' kernels."""

    @property
    def rest(self) -> float:
        """Neither kernels nor exposed transfers: packing, placing, allocation, agreement."""
        known = self.attended + self.first + self.middle + self.last + self.uneven
        return self.step - known


def exposure(ranks: Sequence[RankEvents], chunks: int) -> Exposure:
    """What of a pass's transfers was exposed.  ValueError if ranks posted different messages."""
    counts = {len(rank.posts) for rank in ranks}
    if len(counts) != 1:
        raise ValueError(f"the ranks posted {sorted(counts)} messages; they must post the same")
    begin, end = max(rank.start for rank in ranks), max(rank.end for rank in ranks)
    kernels_end = max(rank.last_kernel for rank in ranks)
    taker = max(ranks, key=lambda rank: sum(p.received for p in rank.posts if p.kind == SENT))
    dispatched = of_kind(ranks[0], SENT)
    first = dispatched[: len(dispatched) // chunks]
    waited = {
        post: stop - start
        for post, (start, stop) in taker.waits.items()
        if stop <= taker.last_kernel
    }
    at_first = sum(waited.get(post, 0.0) for post in first)
    between = sum(waited.get(post, 0.0) for post in dispatched if post not in first)
    early, late = split_returns(ranks)
    early_end = max(kernels_end, _arrival(ranks, early))
    late_end = max(early_end, _arrival(ranks, late))
    return Exposure(
        step=end - begin,
        attended=taker.attended,
        first=at_first,
        middle=between + early_end - kernels_end,
        last=late_end - early_end,
        uneven=kernels_end - taker.last_kernel,
    )


def of_kind(rank: RankEvents, kind: str) -> list[int]:
    """Places of the posts of one kind."""
    return [place for place, post in enumerate(rank.posts) if post.kind == kind]


def split_returns(ranks: Sequence[RankEvents]) -> tuple[list[int], list[int]]:
    """Returns posted while a sender still had kernels to run, and those posted after."""
    early: list[int] = []
    late: list[int] = []
    for place in of_kind(ranks[0], RETURNED):
        senders = [rank for rank in ranks if rank.posts[place].sent]
        after = any(rank.posts[place].at >= rank.last_kernel for rank in senders)
        (late if after else early).append(place)
    return early, late


def middle_seconds(alone: dict[int, float], ranks: Sequence[RankEvents], chunks: int) -> float:
    """Seconds that the middle transfers take alone, from those of every post."""
    dispatched = of_kind(ranks[0], SENT)
    early, _ = split_returns(ranks)
    return sum(alone[post] for post in (*dispatched[len(dispatched) // chunks :], *early))


def from_plain(values: dict[str, Any]) -> RankEvents:
    """Events that came as JSON."""
    return RankEvents(
        **{
            **values,
            "posts": [Post(**post) for post in values["posts"]],
            "waits": {int(post): (a, b) for post, (a, b) in values["waits"].items()},
            "kernels": [(a, b) for a, b in values["kernels"]],
        }
    )


def _arrival(ranks: Sequence[RankEvents], posts: Sequence[int]) -> float:
    """When the last of these messages had arrived at all who receive of them, as far as is known.

    Messages between two ranks arrive in the order in which they were posted, so one has arrived
    once a wait for it, or for a later one, has ended.
    """
    return max(
        (
            min(stop for place, (_, stop) in rank.waits.items() if place >= post)
            for rank in ranks
            for post in posts
            if rank.posts[post].received
        ),
        default=0.0,
    )


@dataclass(slots=True)
class Log:
    """Events of the pass under way on this rank."""

    posts: list[Post] = field(default_factory=list)
    waits: dict[int, tuple[float, float]] = field(default_factory=dict)
    kernels: list[tuple[float, float]] = field(default_factory=list)
