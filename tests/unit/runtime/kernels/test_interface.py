"""Checks that every kernel makes before it touches memory, by way of the CPU kernel."""

from __future__ import annotations

import pytest
import torch

from libra.runtime.kernels.cpu import CpuKernel
from libra.runtime.kernels.interface import Buffers, Grads
from tests.unit.runtime.kernels.kernel_cases import CPU, PREFIX, SCALE, inputs, make_segments


@pytest.mark.parametrize(
    "row, heads, kv_heads, message",
    [
        ((0, 0, 0, 1, 0, 0), 1, 1, "q_len 0"),
        ((0, 3, 0, 2, 0, 0), 1, 1, "k_len 2"),
        ((-1, 1, 0, 1, 0, 0), 1, 1, "q_start -1"),
        ((0, 1, 0, 1, 0, 0), 3, 2, "divide heads"),
        ((0, 1, 0, 1, 0, 0), 0, 0, "kv_heads must be >= 1"),
    ],
)
def test_segments_that_are_not_causal_attention_are_refused(
    row: tuple[int, int, int, int, int, int], heads: int, kv_heads: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CpuKernel().prepare(make_segments(row, heads=heads, kv_heads=kv_heads), CPU)


@pytest.mark.parametrize("bad", ["v_dtype", "out_dtype", "lse_dtype", "rows", "heads", "dim"])
def test_buffers_that_do_not_fit_the_segments_are_refused_before_any_is_read(bad: str) -> None:
    kernel = CpuKernel()
    q, k, v, dout = inputs(PREFIX, torch.float32)
    out, lse = torch.empty_like(dout), torch.empty(PREFIX.segments.lse_size)
    if bad == "v_dtype":
        v = v.bfloat16()
    elif bad == "out_dtype":
        out = out.double()
    elif bad == "lse_dtype":
        lse = lse.bfloat16()
    elif bad == "rows":
        k = k[:-1]
    elif bad == "heads":
        q = q[:, :-1]
    else:
        k = k[..., :-1]
    with pytest.raises(ValueError):
        kernel.forward(kernel.prepare(PREFIX.segments, CPU), Buffers(q, k, v, out, lse), SCALE)


@pytest.mark.parametrize("bad", ["dk", "dq", "dout"])
def test_gradients_that_would_lose_precision_or_rows_are_refused(bad: str) -> None:
    kernel = CpuKernel()
    q, k, v, dout = inputs(PREFIX, torch.bfloat16)
    out, lse = torch.zeros_like(dout), torch.zeros(PREFIX.segments.lse_size)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k).float(), torch.zeros_like(v).float()
    if bad == "dk":
        dk = dk.bfloat16()
    elif bad == "dq":
        dq = dq[:-1]
    else:
        dout = dout.float()
    with pytest.raises(ValueError, match=bad):
        kernel.backward(
            kernel.prepare(PREFIX.segments, CPU),
            Buffers(q, k, v, out, lse),
            Grads(dout, dq, dk, dv),
            SCALE,
        )
