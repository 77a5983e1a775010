"""What a kernel is asked for: causal segments over resident buffers.

    q rows of one segment          k rows of one segment
    [q_start, q_start + q_len)     [k_start, k_start + k_len)

              k_start                       k_start + k_len
                 |<------- prefix ------->|<- q_len ->|
      q_start    | 1 1 1 1 1 1 1 1 1 1 1 1 1          |
                 | 1 1 1 1 1 1 1 1 1 1 1 1 1 1        |     bottom-right aligned causal mask
                 | 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1      |
      + q_len    | 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1|

Every segment of one call has the same head width.  Several segments may read one K/V range; each
query row and head belongs to exactly one segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One kernel call's work.  All arrays int64 [segments]; `q_len >= 1` and `k_len >= q_len`, or
    `k_len >= 1` where not causal.
    """

    q_start: IntArray
    q_len: IntArray
    k_start: IntArray
    k_len: IntArray
    q_head: IntArray
    """First query head in the q buffer."""
    kv_head: IntArray
    """First key/value head in the k and v buffers."""
    heads: int
    """Query heads of every segment."""
    kv_heads: int
    """Key/value heads of every segment; query head i of a segment reads its key/value head i //
    (heads / kv_heads).
    """
    causal: bool = True
    """False: every query row of a segment sees all its keys, as between blocks of a ring."""

    def __len__(self) -> int:
        return len(self.q_start)

    @property
    def lse_size(self) -> int:
        """Elements of the flat LSE: segment-major, then head, then row."""
        return int(self.q_len.sum()) * self.heads
