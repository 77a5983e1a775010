"""What every kernel refuses before it touches memory: torn head groups, ranges past a buffer, mixed
dtypes.

Shape legend: T rows of a buffer, N heads, D key head dim, E value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from libra.runtime.kernels.interface import AttentionCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """How far the segments of one call reach into the buffers, as plain integers for a check
    without a device sync.
    """

    q_rows: int
    k_rows: int
    q_heads: int
    kv_heads: int
    lse_size: int


def check_segments(segments: AttentionCall) -> Extents:
    """The reach of `segments`.  ValueError if one is empty, lacks keys, or tears a query group."""
    if len(segments) == 0:
        return Extents(q_rows=0, k_rows=0, q_heads=0, kv_heads=0, lse_size=0)
    heads, kv_heads = segments.heads, segments.kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"segments of {heads} query heads over {kv_heads} key/value heads: "
            "kv_heads must be >= 1 and divide heads"
        )
    for name in ("q_start", "k_start", "q_head", "kv_head"):
        _refuse_first(getattr(segments, name) < 0, name, getattr(segments, name), ">= 0")
    _refuse_first(segments.q_len < 1, "q_len", segments.q_len, ">= 1; drop empty segments")
    if segments.causal:
        need = ">= q_len; causal rows need a key of their own"
        _refuse_first(segments.k_len < segments.q_len, "k_len", segments.k_len, need)
    _refuse_first(segments.k_len < 1, "k_len", segments.k_len, ">= 1; drop empty segments")
    return Extents(
        q_rows=int((segments.q_start + segments.q_len).max()),
        k_rows=int((segments.k_start + segments.k_len).max()),
        q_heads=int(segments.q_head.max()) + heads,
        kv_heads=int(segments.kv_head.max()) + kv_heads,
        lse_size=segments.lse_size,
    )


def check_buffers(
    extents: Extents,
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    out_TNE: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """ValueError unless dtypes and dims are as `Kernel` says and the buffers hold `extents`."""
    if not q_TND.dtype == k_TND.dtype == v_TNE.dtype == out_TNE.dtype:
        raise ValueError(
            f"q, k, v, out are {q_TND.dtype}, {k_TND.dtype}, {v_TNE.dtype}, {out_TNE.dtype}; "
            "attention needs one dtype: cast them alike"
        )
    want = torch.float64 if q_TND.dtype == torch.float64 else torch.float32
    if lse.dtype != want or not lse.is_contiguous() or lse.numel() < extents.lse_size:
        raise ValueError(
            f"lse is {lse.dtype}[{lse.numel()}], contiguous={lse.is_contiguous()}; "
            f"it must be contiguous {want} of at least {extents.lse_size} elements"
        )
    if q_TND.shape[2] != k_TND.shape[2] or v_TNE.shape[2] != out_TNE.shape[2]:
        raise ValueError(
            f"head dims are q {q_TND.shape[2]}, k {k_TND.shape[2]}, v {v_TNE.shape[2]}, "
            f"out {out_TNE.shape[2]}: q must match k, and v must match out"
        )
    if q_TND.shape[2] < 1 or v_TNE.shape[2] < 1:
        raise ValueError(
            f"head dims are {q_TND.shape[2]} (key) and {v_TNE.shape[2]} (value); they must be >= 1"
        )
    for name, tensor, rows, heads in (
        ("q", q_TND, extents.q_rows, extents.q_heads),
        ("k", k_TND, extents.k_rows, extents.kv_heads),
        ("v", v_TNE, extents.k_rows, extents.kv_heads),
        ("out", out_TNE, extents.q_rows, extents.q_heads),
    ):
        if tensor.shape[0] < rows or tensor.shape[1] < heads:
            raise ValueError(
                f"{name} holds {tensor.shape[0]} rows x {tensor.shape[1]} heads, "
                f"but its segments reach {rows} x {heads}: the plan is for another buffer"
            )


def check_gradients(
    extents: Extents,
    q_TND: torch.Tensor,
    dout_TNE: torch.Tensor,
    out_TNE: torch.Tensor,
    dq_TND: torch.Tensor,
    dk_TND: torch.Tensor,
    dv_TNE: torch.Tensor,
) -> None:
    """ValueError unless dout, dq look like out, q and dk, dv are accumulators for every key."""
    for name, like, grad, model in (
        ("dout", "out", dout_TNE, out_TNE),
        ("dq", "q", dq_TND, q_TND),
    ):
        if grad.shape != model.shape or grad.dtype != model.dtype:
            raise ValueError(
                f"{name} is {grad.dtype}{list(grad.shape)}; "
                f"it must be {model.dtype}{list(model.shape)} like {like}"
            )
    least = torch.promote_types(q_TND.dtype, torch.float32)
    for name, grad in (("dk", dk_TND), ("dv", dv_TNE)):
        if torch.promote_types(grad.dtype, least) != grad.dtype:
            raise ValueError(
                f"{name} is {grad.dtype}; "
                f"sums of several segments need an accumulator of at least {least}"
            )
        if grad.shape[0] < extents.k_rows or grad.shape[1] < extents.kv_heads:
            raise ValueError(
                f"{name} holds {grad.shape[0]} rows x {grad.shape[1]} heads, "
                f"but its segments reach {extents.k_rows} x {extents.kv_heads}"
            )


def _refuse_first(bad: np.ndarray, name: str, values: np.ndarray, need: str) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(f"segment {at} has {name} {int(values[at])}; it must be {need}")
