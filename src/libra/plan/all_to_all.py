"""What one worker sends and receives, chunk by chunk.

K and V arrive in two messages: from those who hold them, then from relays, who send on what has
landed with them.  The worker's own rows of a sample land last; then each sample's rows are put in
order.

    landed      | from holders | from relays | own |
    kv buffer   | need | need | need | ...         |     the same rows, need by need

Rows are *head_group rows*: a local tensor [rows, heads, dim] seen as [rows * head_groups, head_group width], so that
one gather packs a message. Both sides order a message by (tile or sample, head_group, position), so
nothing but rows travels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.geometry import spread
from libra.plan.head_groups import HeadGroups
from libra.plan.plan_pool import PoolPlan

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """One all-to-all of one kind of rows, as one worker sees it."""

    send: IntArray
    """Lane rows to send, ordered by destination: local ones, or what landed at a relay."""
    send_splits: IntArray
    """Rows to each worker, [workers]."""
    recv_splits: IntArray
    """Rows from each worker, [workers]."""
    moves: bool
    """Whether any worker of the pool sends anything; the same on all, so all skip or none."""

    @property
    def received(self) -> int:
        """Rows that arrive."""
        return int(self.recv_splits.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """How the K and V rows of one kv buffer come to lie need by need, each row once."""

    rows: int
    """Rows of the buffer."""
    own: IntArray
    """Local kv head_group rows, which land behind those that arrive."""
    place: IntArray | None
    """Buffer row of each landed row, a permutation, [rows]; None if they land in their order."""

    @property
    def apart(self) -> bool:
        """Whether rows have to land outside the buffer, because they arrive in another order."""
        return self.place is not None


def q_messages(plan: PoolPlan, worker: int) -> tuple[tuple[AllToAll, ...], IntArray]:
    """Q messages per chunk, and the row at which each moved (tile, head_group of a chunk) lies in its
    chunk's buffer.
    """
    geometry, head_groups = plan.geometry, plan.head_groups
    home = np.repeat(geometry.block_worker, head_groups.shards)
    length = np.repeat(geometry.block_stop - geometry.block_start, head_groups.shards)
    local = np.repeat(geometry.block_local, head_groups.shards)
    away = (home != plan.assignment) & (length > 0)

    sent = np.flatnonzero(away & (home == worker))
    sent = sent[np.argsort(plan.assignment[sent], kind="stable")]
    got = np.flatnonzero(away & (plan.assignment == worker))
    got = got[np.argsort(home[got], kind="stable")]
    offset = np.full((len(home), head_groups.per_chunk), -1, dtype=np.int64)
    lengths = np.repeat(length[got], head_groups.per_chunk)
    offset[got] = (np.cumsum(lengths) - lengths).reshape(-1, head_groups.per_chunk)
    send_splits = _count(plan.assignment[sent], length[sent] * head_groups.per_chunk, plan.workers)
    recv_splits = _count(home[got], length[got] * head_groups.per_chunk, plan.workers)
    # Rows of chunk 0; every other chunk sends the same rows, some head_groups further on.
    head_group = (sent % head_groups.shards * head_groups.per_shard)[:, None] + np.arange(
        head_groups.per_chunk
    )
    first_row = (local[sent] * head_groups.count)[:, None] + head_group
    send = spread(
        first_row.ravel(), np.repeat(length[sent], head_groups.per_chunk), head_groups.count
    )
    messages = [
        AllToAll(
            send=send + chunk * head_groups.per_chunk,
            send_splits=send_splits,
            recv_splits=recv_splits,
            moves=bool(away.any()),
        )
        for chunk in range(head_groups.chunks)
    ]
    return tuple(messages), offset


@dataclass(frozen=True, slots=True, eq=False)
class KVMessages:
    """How K and V come to one worker, per chunk."""

    kv: tuple[AllToAll, ...]
    """From the holders."""
    relay: tuple[AllToAll, ...]
    """From relays, once `kv` has arrived there."""
    assembly: tuple[Assembly, ...]
    start: IntArray
    """Buffer row at which each of the worker's needs starts."""


def kv_messages(plan: PoolPlan, worker: int) -> KVMessages:
    """Both K/V messages of each chunk, and how needs are put together from what they bring."""
    head_groups, needs, moves = plan.head_groups, plan.kv_fetches, plan.kv_transfers
    start = np.full(len(needs.worker), -1, dtype=np.int64)
    remote, second = moves.source != moves.destination, moves.second
    lane_row = (
        moves.local * head_groups.kv_count + moves.kv_head_group
    )  # of a run's first row, at its holder
    landed = np.full(len(moves.need), -1, dtype=np.int64)  # where the first row of a run lands
    messages, relays, assemblies = [], [], []
    for chunk in range(head_groups.chunks):
        now = moves.chunk == chunk
        sent = np.flatnonzero(now & remote & (moves.source == worker))  # already by destination
        sent, passed_on = sent[~second[sent]], sent[second[sent]]
        mine = np.flatnonzero(now & (moves.destination == worker))
        length, own = moves.length[mine], ~remote[mine]
        arrives = np.where(own, 0, length)
        at = _offsets(arrives)
        at[own] = arrives.sum() + _offsets(length[own])
        landed[mine] = at

        # Needs in the order in which they begin to land: what comes in order is not moved again.
        need, which = np.unique(moves.need[mine], return_inverse=True)
        first = np.full(len(need), np.iinfo(np.int64).max)
        np.minimum.at(first, which, at)
        order = np.argsort(first)
        base = np.empty_like(first)
        base[order] = _offsets(needs.length[need[order]])
        start[need] = base
        to = base[which] + moves.offset[mine]
        place = None
        if not np.array_equal(at, to):
            place = np.empty(length.sum(), dtype=np.int64)
            place[spread(at, length)] = spread(to, length)
        from_holders = np.where(second[mine], 0, arrives)
        messages.append(
            AllToAll(
                send=spread(lane_row[sent], moves.length[sent], head_groups.kv_count),
                send_splits=_count(moves.destination[sent], moves.length[sent], plan.workers),
                recv_splits=_count(moves.source[mine], from_holders, plan.workers),
                moves=bool((now & remote & ~second).any()),
            )
        )
        relays.append(
            AllToAll(
                send=spread(landed[moves.via[passed_on]], moves.length[passed_on]),
                send_splits=_count(
                    moves.destination[passed_on], moves.length[passed_on], plan.workers
                ),
                recv_splits=_count(moves.source[mine], arrives - from_holders, plan.workers),
                moves=bool((now & second).any()),
            )
        )
        assemblies.append(
            Assembly(
                rows=int(length.sum()),
                own=spread(lane_row[mine][own], length[own], head_groups.kv_count),
                place=place,
            )
        )
    return KVMessages(
        kv=tuple(messages), relay=tuple(relays), assembly=tuple(assemblies), start=start
    )


def last_reader(head_groups: HeadGroups) -> tuple[int, ...]:
    """Last chunk that reads each kv buffer, on any worker and whatever the placement."""
    head_group = np.arange(head_groups.count, dtype=np.int64)
    last = np.zeros(head_groups.kv_count, dtype=np.int64)
    np.maximum.at(last, head_groups.kv_head_group(head_group), head_groups.chunk(head_group))
    done = np.arange(head_groups.chunks, dtype=np.int64)
    np.maximum.at(done, head_groups.chunk(head_group), last[head_groups.kv_head_group(head_group)])
    return tuple(int(chunk) for chunk in done)


def lands_apart(plan: PoolPlan) -> NDArray[np.bool_]:
    """`Assembly.apart` of every kv buffer and worker, [chunks, workers]."""
    moves = plan.kv_transfers
    own = moves.source == moves.destination
    order = np.lexsort((own, moves.destination, moves.chunk))  # as rows land, message by message
    need, offset, length = moves.need[order], moves.offset[order], moves.length[order]
    follows = np.zeros(len(order), dtype=np.bool_)
    follows[1:] = (need[1:] == need[:-1]) & (offset[1:] == offset[:-1] + length[:-1])
    torn = order[(offset > 0) & ~follows]
    apart = np.zeros((plan.head_groups.chunks, plan.workers), dtype=np.bool_)
    apart[moves.chunk[torn], moves.destination[torn]] = True
    return apart


def _offsets(length: IntArray) -> IntArray:
    """Where ranges that follow each other start."""
    return np.asarray(np.cumsum(length) - length)


def _count(worker: NDArray[np.integer], rows: IntArray, workers: int) -> IntArray:
    return np.bincount(worker, weights=rows, minlength=workers).astype(np.int64)
