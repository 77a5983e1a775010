"""Kernel tables made of published figures, for machines that nobody has calibrated.

Published are TFLOP/s of FlashAttention with head dim 128 in bf16/fp16 and 16 heads, over 16K tokens
in sequences of one length: the FlashAttention-3 paper (Shah et al. 2024, arXiv 2407.08608), figures
5 and 6, on an H100 SXM.  All else here is an assumption, and stated:

- A segment with a prefix is a causal square and a rectangle beside it.  The square runs at the rate
  of causal self-attention of its length, the rectangle at that of non-causal self-attention as long
  as its keys, and their times add.
- Below 512 tokens, where nothing is published, the rate falls by the same factor with every halving
  as from 1K to 512, down to a tile of 128 rows (and 128 keys); smaller segments take as long as one
  tile.
- Backward is published without a mask only; the mask costs it what it costs the forward.
- Heads make no difference: launches are taken to fill the GPU, as those measured did.
- FlashAttention-2 on an A100 and FlashAttention-4 on a B200 behave as FlashAttention-2 and 3 on the
  H100 do, scaled to the best that is reported of them: 73% of the peak forward and 63% backward on
  the A100 (Dao 2023, arXiv 2307.08691, section 4.1), 71% forward on the B200 (the FlashAttention-4
  paper, 1,613 TFLOP/s), whose backward is scaled alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape
from libra.cost.hardware import AttentionFigures, Cluster
from libra.cost.kernel_table import KernelTable
from libra.cost.table_file import read_kernel_table
from libra.data.lengths import causal_pairs

Floats = NDArray[np.float64]

_H100_PEAK: Final = 989.0
_LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384)
_TILE: Final = 128
_GRID_Q: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, *_LENGTHS)
_GRID_RATIO: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """TFLOP/s at `_LENGTHS` on the H100, and what they are scaled to."""

    source: str
    causal: tuple[float, ...]
    full: tuple[float, ...]
    full_backward: tuple[float, ...]
    best_forward: float | None = None
    """Best fraction of the peak that a forward reaches on the machine meant; None: this one."""
    best_backward: float | None = None


# Figure 5 (forward, head dim 128, with and without causal mask), figure 6 (backward, head dim 128).
_FLASH_2: Final = ((191, 260, 298, 319, 333, 335), (309, 350, 362, 368, 370, 370))
_FLASH_2_BACKWARD: Final = (214, 260, 291, 310, 318, 322)
_FLASH_3: Final = ((292, 423, 521, 579, 602, 616), (467, 565, 625, 638, 646, 648))
_FLASH_3_BACKWARD: Final = (316, 424, 501, 542, 559, 561)


def published_table(cluster: Cluster, *, key_dim: int = 128, value_dim: int = 128) -> KernelTable:
    """The table that stands in for a measured one on `cluster`.

    The figures are for head dim 128; `key_dim` and `value_dim` change the operations only.
    """
    figures = _figures(cluster.attention_figures)
    causal, full = _curve(figures.causal), _curve(figures.full)
    mask = np.array(figures.causal) / np.array(figures.full)
    full_backward = _curve(figures.full_backward)
    causal_backward = _curve(tuple(mask * np.array(figures.full_backward)))
    forward, backward = _segments(causal, full), _segments(causal_backward, full_backward)
    if figures.best_forward is not None:
        scale = figures.best_forward * _H100_PEAK / max(figures.full)
        forward *= scale
        if figures.best_backward is not None:
            scale = figures.best_backward * _H100_PEAK / max(figures.full_backward)
        backward *= scale
    return KernelTable(
        source=f"{figures.source}; assumptions as in libra.cost.published",
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


def _figures(name: AttentionFigures) -> _Figures:
    if name == "flash-2":
        return _Figures(
            source="FlashAttention-2, figures of the FlashAttention-3 paper scaled to an A100",
            causal=_FLASH_2[0],
            full=_FLASH_2[1],
            full_backward=_FLASH_2_BACKWARD,
            best_forward=0.73,
            best_backward=0.63,
        )
    flash_3 = _Figures(
        source="FlashAttention-3 paper, figures 5 and 6, H100 SXM, head dim 128",
        causal=_FLASH_3[0],
        full=_FLASH_3[1],
        full_backward=_FLASH_3_BACKWARD,
    )
    if name == "flash-3":
        return flash_3
    return _Figures(
        source="FlashAttention-4, FlashAttention-3's figures scaled to a B200",
        causal=_FLASH_3[0],
        full=_FLASH_3[1],
        full_backward=_FLASH_3_BACKWARD,
        best_forward=0.71,
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    """Fraction of the peak by length, from a tile on; straight in logarithms."""

    lengths: Floats
    fractions: Floats

    def at(self, length: float) -> float:
        logs = np.interp(np.log(length), np.log(self.lengths), np.log(self.fractions))
        return float(np.exp(logs))


def _curve(tflops: tuple[float, ...]) -> _Curve:
    """Continued from 512 down to a tile at the slope between 1K and 512."""
    step = tflops[0] / tflops[1]
    longer = np.array(tflops) / _H100_PEAK
    shorter = longer[0] * step ** np.array([2, 1])
    lengths = np.array((_TILE, 2 * _TILE, *_LENGTHS), dtype=np.float64)
    return _Curve(lengths, np.concatenate([shorter, longer]))


def _segments(causal: _Curve, full: _Curve) -> Floats:
    """Fractions at the grid points, [Q, K]."""
    result = np.zeros((len(_GRID_Q), len(_GRID_RATIO)))
    for i, q in enumerate(_GRID_Q):
        for j, ratio in enumerate(_GRID_RATIO):
            k = q * ratio
            pairs = float(causal_pairs(k - q, k))
            # In units of pairs over fraction; a tile is paid whole.
            square = float(causal_pairs(0, max(q, _TILE))) / causal.at(max(q, _TILE))
            width = (-(-k // _TILE) - -(-q // _TILE)) * _TILE
            beside = max(q, _TILE) * width / full.at(max(k, _TILE))
            result[i, j] = pairs / (square + beside)
    return result
