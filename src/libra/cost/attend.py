"""Seconds that a pool's workers attend, from their kernel segments and a kernel table.

What they get is what `libra.cost.timeline.pool_timeline` takes as `attend`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libra.cost.kernel_table import Direction, KernelTable
from libra.plan.attention_calls import LOCAL
from libra.plan.work import Work

Seconds = NDArray[np.float64]


def attend_seconds(
    work: Work, table: KernelTable, *, workers: int, chunks: int, direction: Direction
) -> tuple[Seconds, Seconds]:
    """Seconds of each worker's local work, [workers], and of its chunks, [workers, chunks].

    A launch, the segments of a worker that wait for one chunk and read the same buffers, takes the
    sum of its segments' seconds and those of a call.  The table is taken to be for these heads.
    """
    seconds = table.seconds(work.q_len, work.k_len, work.heads, direction=direction)
    # Local work in column 0, chunk c in column c + 1.
    place = work.worker * (chunks + 1) + work.chunk - LOCAL
    cells = workers * (chunks + 1)
    total = np.bincount(place, weights=seconds, minlength=cells)
    buffers = (work.q_buffer - LOCAL) * (chunks + 1) + work.kv_buffer - LOCAL
    launches = np.unique(place * (chunks + 1) ** 2 + buffers) // (chunks + 1) ** 2
    total = total + np.bincount(launches, minlength=cells) * table.call_seconds
    grid = total.reshape(workers, chunks + 1)
    return np.ascontiguousarray(grid[:, 0]), np.ascontiguousarray(grid[:, 1:])
