"""Kernel tables made of published figures, for machines that nobody has calibrated.

Published are TFLOP/s of FlashAttention with head dim 128 in bf16/fp16 and 16 heads, over 16K tokens
in sequences of one length: the FlashAttention-3 paper (Shah et al. 2024, arXiv 2407.08608), figures
5 and 6, on an H100 SXM.  All else here is a stated assumption:

- A segment with a prefix is a causal square and a rectangle next to it.  The square runs at the
  rate of causal self-attention of its length, the rectangle at that of non-causal self-attention as
  long as its keys, and their times add.
- Below 512 tokens, where nothing is published, the rate falls by the same factor with every halving
  as from 1K to 512, down to a tile of 128 rows (and 128 keys); smaller segments take as long as one
  tile.
- Backward is published without a mask only; the mask costs it the share that it costs the forward.
- The number of heads makes no difference: calls are taken to fill the GPU, as those measured did.
- FlashAttention-2 on an A100 and FlashAttention-4 on a B200 behave as FlashAttention-2 and 3 on the
  H100 do, scaled to the best that is reported of them: 73% of the peak forward and 63% backward on
  the A100 (Dao 2023, arXiv 2307.08691, section 4.1), 71% forward on the B200 (the FlashAttention-4
  paper, 1,613 TFLOP/s), whose backward is scaled alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape
from libra.cost.arrays import Floats
from libra.cost.fields import preset_sections
from libra.cost.hardware import Cluster
from libra.cost.kernel_table import KernelTable, read_kernel_table
from libra.data.lengths import causal_pairs

_H100_PEAK: Final = 989.0
_LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384)
_TILE: Final = 128
_GRID_Q: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, *_LENGTHS)
_GRID_RATIO: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FIGURES: Final = preset_sections("attention")


def published_table(cluster: Cluster, *, key_dim: int = 128, value_dim: int = 128) -> KernelTable:
    """The table that stands in for a measured one on `cluster`.

    The figures are for head dim 128; `key_dim` and `value_dim` change the operations only.
    """
    figures = _FIGURES[cluster.attention_figures]
    causal, full, full_backward = (
        np.array(figures[name], dtype=np.float64) for name in ("causal", "full", "full_backward")
    )
    forward = _segments(causal, full)
    backward = _segments(causal / full * full_backward, full_backward)
    # Scale both passes to the machine; a backward without a best of its own scales as the forward.
    if "best_forward" in figures:
        scale = figures["best_forward"] * _H100_PEAK / full.max()
        forward *= scale
        if "best_backward" in figures:
            scale = figures["best_backward"] * _H100_PEAK / full_backward.max()
        backward *= scale
    return KernelTable(
        source=f"{figures['source']}; assumptions as in libra.cost.published",
        peak_flops=cluster.peak_flops,
        key_dim=key_dim,
        value_dim=value_dim,
        q_len=np.array(_GRID_Q, dtype=np.int64),
        k_per_q=np.array(_GRID_RATIO, dtype=np.float64),
        heads=np.array([1], dtype=np.int64),
        forward=forward[:, :, None],
        backward=backward[:, :, None],
        call_seconds=10e-6,  # an assumption: launching a kernel and preparing its arguments
    )


def cluster_table(cluster: Cluster, heads: HeadShape, measured: Path | None = None) -> KernelTable:
    """The kernel table in the file `measured`, or the published one.  Raises ValueError."""
    if measured is not None:
        return read_kernel_table(measured)
    return published_table(cluster, key_dim=heads.dim, value_dim=heads.value_dim)


def _fraction(tflops: Floats, length: NDArray[np.int64]) -> Floats:
    """Fraction of the peak at each `length` from a tile on: continued from 512 down at the slope
    between 1K and 512, and straight between lengths in logarithms.
    """
    # For example FlashAttention-3 causal: 292 at 512 and 423 at 1K, a factor of 0.69 a halving, so
    # 202 at 256 tokens and 139 at 128.
    fractions = tflops / _H100_PEAK
    step = tflops[0] / tflops[1]
    fractions = np.concatenate([fractions[0] * step ** np.array([2, 1]), fractions])
    lengths = np.log((_TILE, 2 * _TILE, *_LENGTHS))
    return np.exp(np.interp(np.log(length), lengths, np.log(fractions)))


def _segments(causal: Floats, full: Floats) -> Floats:
    """Fractions at the grid points, [Q, K], from TFLOP/s with a causal mask and without.

    For example q = 512 rows and k = 1024 keys: a causal square of 512 x 512, and a rectangle of 512
    rows and 512 keys that runs as fast as non-causal attention over 1024 keys.
    """
    q = np.array(_GRID_Q, dtype=np.int64)[:, None]
    k = q * np.array(_GRID_RATIO, dtype=np.int64)
    rows = np.maximum(q, _TILE)  # a tile is paid whole
    # Both in units of pairs over fraction.
    square = causal_pairs(0, rows) / _fraction(causal, rows)
    width = (-(-k // _TILE) - -(-q // _TILE)) * _TILE
    rectangle = rows * width / _fraction(full, np.maximum(k, _TILE))
    return np.asarray(causal_pairs(k - q, k) / (square + rectangle))
