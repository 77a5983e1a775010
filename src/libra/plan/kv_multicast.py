"""Which rows of K and V travel by way of a relay.

    direct     s -> a,  s -> b,  s -> c          every row leaves its holder once a destination
    relayed    s -> b;  b -> a,  b -> c          every row leaves it once; one who needs it anyway
                                                 passes it on to the others

A scatter, then an all-gather: all still receive every row once and as many bytes travel, but not
all from the few workers that hold a long sample.  Only destinations outside the holder's node take
part, for links within a node are quick.  They need prefixes of a run, so any who needs a block of
it whole can be that block's relay.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.plan.geometry import spread
from libra.plan.kv_fetch import KVFetches, KVTransfers, in_order

IntArray = NDArray[np.int64]

FEWEST_ROWS: Final = 16
"""Blocks of fewer rows are not worth a second message."""

_BLOCKS: Final = 2
"""Blocks of a sample for each destination: more of them balance the relays better, at more runs."""


def with_multicast(
    moves: KVTransfers, needs: KVFetches, *, workers: int, per_node: int
) -> KVTransfers:
    """The same rows to the same needs, with relays between nodes of `per_node` neighbouring workers
    where several destinations need a run.

    Deterministic: a block goes to the relay that has least to pass on in its chunk, among equals to
    the one that needs most rows of the run.
    """
    far = np.flatnonzero(moves.source // per_node != moves.destination // per_node)
    column = moves.chunk * (1 + int(needs.sample.max(initial=0))) + needs.sample[moves.fetch]
    column = column * (1 + int(moves.kv_head_group.max(initial=0))) + moves.kv_head_group
    # Runs of one holder, sample and head_group side by side, longest first.
    shorter = moves.destination - moves.length * workers
    far = far[np.lexsort((shorter[far], moves.offset[far], column[far]))]
    length, destination = moves.length[far], moves.destination[far]
    new_sample = _differs(column[far])
    opens = new_sample | _differs(moves.offset[far])
    first = np.flatnonzero(opens)  # of each group: the runs of one holder, sample and head_group
    count = np.diff(np.append(first, len(far)))
    shared = np.zeros(len(first), dtype=np.int64)  # rows that two or more need
    several = np.flatnonzero(count > 1)
    shared[several] = length[first[several] + 1]
    shared[shared < FEWEST_ROWS] = 0
    if not shared.any():
        return moves

    # Blocks: a sample's shared rows in nearly equal parts, none across holders.
    of_sample = np.cumsum(new_sample)[first] - 1
    whole = np.bincount(of_sample, weights=shared)[of_sample].astype(np.int64)
    parts = -(-_BLOCKS * count * shared // np.maximum(whole, 1))
    parts = np.minimum(parts, shared // FEWEST_ROWS)
    group = np.repeat(np.arange(len(first)), parts)
    part = spread(np.zeros_like(parts), parts)
    low = part * shared[group] // parts[group]
    high = (part + 1) * shared[group] // parts[group]

    # Of a group's runs, longest first, so many hold a block whole, and so many any of its rows.
    span = int(length.max()) + 1
    key = (np.cumsum(opens) - 1) * span - length
    holds = np.searchsorted(key, group * span - high, side="right") - first[group]
    needing = np.searchsorted(key, group * span - low, side="left") - first[group]
    below = np.append(0, np.cumsum(length))
    partial = below[first[group] + needing] - below[first[group] + holds] - (needing - holds) * low
    passed_on = (holds - 1) * (high - low) + partial
    relay = first[group] + _least_busy(
        destination, first[group], holds, passed_on, moves.chunk[far[first[group]]], workers
    )

    stays = np.ones(len(moves.fetch), dtype=np.bool_)
    stays[far[np.repeat(shared > 0, count)]] = False
    longest = first[(shared > 0) & (length[first] > shared)]  # their last rows have one destination
    taken = np.searchsorted(first, longest)
    hop_one = _parts(
        moves,
        np.concatenate([np.flatnonzero(stays), far[longest], far[relay]]),
        np.concatenate([np.zeros(stays.sum(), dtype=np.int64), shared[taken], low]),
        np.concatenate([moves.length[stays], length[longest] - shared[taken], high - low]),
    )

    block = np.repeat(np.arange(len(group)), needing)
    member = spread(first[group], needing)
    other = member != relay[block]
    block, member = block[other], member[other]
    hop_two = _parts(
        moves,
        far[member],
        low[block],
        np.minimum(length[member], high[block]) - low[block],
        source=destination[relay[block]],
        via=len(hop_one.fetch) - len(group) + block,
    )
    return in_order(
        KVTransfers(
            *(
                np.concatenate([getattr(hop_one, name), getattr(hop_two, name)])
                for name in [f.name for f in fields(KVTransfers)]
            )
        ),
        needs,
    )


def sent_rows(moves: KVTransfers, workers: int, per_node: int) -> IntArray:
    """kv head_group rows that each worker sends to other nodes, and to all, int64 [2, workers]."""
    source, node = moves.source, moves.source // per_node
    return np.stack(
        [
            np.bincount(source, weights=moves.length * away, minlength=workers).astype(np.int64)
            for away in (node != moves.destination // per_node, source != moves.destination)
        ]
    )


def relieves(direct: IntArray, relayed: IntArray) -> bool:
    """Whether relays let the worker that sends most to other nodes send less, and none more in all
    than the busiest did: limits that hold without relays hold with them.

    Takes what each worker sends to other nodes, and to all, [2, workers].
    """
    far, most = relayed.max(axis=1) - direct.max(axis=1)
    return bool(far < 0 and most <= 0)


def _differs(column: IntArray) -> NDArray[np.bool_]:
    """Whether each entry differs from the one before it; the first does."""
    new = np.ones(len(column), dtype=np.bool_)
    new[1:] = column[1:] != column[:-1]
    return new


def _least_busy(
    destination: IntArray,
    first: IntArray,
    holds: IntArray,
    passed_on: IntArray,
    chunk: IntArray,
    workers: int,
) -> IntArray:
    """Which of its first `holds` runs relays each block: the one whose worker passes on least so
    far.  Blocks of few candidates choose first.
    """
    chosen = np.zeros(len(first), dtype=np.int64)
    worker, busy = destination.tolist(), [[0] * workers for _ in range(1 + int(chunk.max()))]
    begin, among, rows, of = (column.tolist() for column in (first, holds, passed_on, chunk))
    for block in np.argsort(holds, kind="stable").tolist():
        start, load = begin[block], busy[of[block]]
        candidates = worker[start : start + among[block]]
        loads = [load[who] for who in candidates]
        index = loads.index(min(loads))
        load[candidates[index]] += rows[block]
        chosen[block] = index
    return chosen


def _parts(
    moves: KVTransfers,
    run: IntArray,
    low: IntArray,
    length: IntArray,
    source: IntArray | None = None,
    via: IntArray | None = None,
) -> KVTransfers:
    """Rows [low, low + length) of runs; from their holder, or from relays `source`."""
    return KVTransfers(
        fetch=moves.fetch[run],
        source=moves.source[run] if source is None else source,
        destination=moves.destination[run],
        chunk=moves.chunk[run],
        kv_head_group=moves.kv_head_group[run],
        source_row=moves.source_row[run] + low if source is None else np.full_like(run, -1),
        length=length,
        offset=moves.offset[run] + low,
        via=np.full_like(run, -1) if via is None else via,
    )
