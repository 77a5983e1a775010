"""What every kernel is tested on: random segment sets, and dense fp64 attention to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.interface import Buffers, Grads, Kernel

SCALE = 0.3
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launch and the buffers it addresses."""

    segments: AttentionCall
    q_shape: tuple[int, int, int]
    k_shape: tuple[int, int, int]
    v_shape: tuple[int, int, int]
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that a kernel writes."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def make_segments(
    *rows: tuple[int, int, int, int, int, int], heads: int, kv_heads: int, causal: bool = True
) -> AttentionCall:
    """AttentionCall from rows of (q_start, q_len, k_start, k_len, q_head, kv_head)."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return AttentionCall(*columns, heads=heads, kv_heads=kv_heads, causal=causal)


def plain_case(
    lengths: list[int], heads: int, kv_heads: int, dim: int, value_dim: int | None = None
) -> Case:
    """Whole samples that lie back to back: no prefix, full width."""
    start = np.cumsum([0, *lengths])
    rows = [(s, n, s, n, 0, 0) for s, n in zip(start.tolist(), lengths, strict=False)]
    total = int(start[-1])
    return Case(
        segments=make_segments(*rows, heads=heads, kv_heads=kv_heads),
        q_shape=(total, heads, dim),
        k_shape=(total, kv_heads, dim),
        v_shape=(total, kv_heads, value_dim or dim),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Blocks of samples that share prefixes, in any order, at any heads, with idle rows between."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    head_groups, causal = draw(st.integers(1, 3)), draw(st.booleans())
    q_pad, kv_total = draw(st.integers(0, 2)), kv_heads + draw(st.integers(0, 3))
    samples, k_rows = [], draw(st.integers(0, 3))
    for length in draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)):
        samples.append((k_rows, length))
        k_rows += length + draw(st.integers(0, 2))
    rows, q_rows = [], 0
    for _ in range(draw(st.integers(1, 6))):
        start, length = draw(st.sampled_from(samples))
        k_len = draw(st.integers(1, length))
        q_len = draw(st.integers(1, k_len if causal else 40))
        q_rows += draw(st.integers(0, 1))
        for head_group in draw(st.sets(st.integers(0, head_groups - 1), min_size=1)):
            kv_head = draw(st.integers(0, kv_total - kv_heads))
            rows.append((q_rows, q_len, start, k_len, q_pad + head_group * heads, kv_head))
        q_rows += q_len
    dim, value_dim = draw(st.sampled_from([(8, 8), (8, 8), (8, 16), (16, 8), (5, 5), (4, 7)]))
    return Case(
        segments=make_segments(
            *draw(st.permutations(rows)), heads=heads, kv_heads=kv_heads, causal=causal
        ),
        q_shape=(q_rows + draw(st.integers(0, 1)), q_pad + head_groups * heads, dim),
        k_shape=(k_rows, kv_total, dim),
        v_shape=(k_rows, kv_total, value_dim),
        seed=draw(st.integers(0, 9)),
    )


PREFIX = Case(
    segments=make_segments(
        (0, 1, 0, 1, 0, 0),
        (1, 150, 0, 300, 3, 0),
        (1, 150, 5, 150, 0, 1),
        (151, 7, 293, 7, 1, 1),
        heads=2,
        kv_heads=1,
    ),
    q_shape=(158, 5, 8),
    k_shape=(300, 2, 8),
    v_shape=(300, 2, 8),
)


def inputs(
    case: Case, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(case.seed)
    dout_shape = (*case.q_shape[:2], case.v_shape[2])
    q, k, v, dout = (
        torch.randn(shape, dtype=torch.float64).to(dtype)
        for shape in (case.q_shape, case.k_shape, case.v_shape, dout_shape)
    )
    return q, k, v, dout


def run(
    kernel: Kernel,
    case: Case,
    dtype: torch.dtype,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Result:
    """Forward and backward; idle rows must stay 7, and accumulators must add to the 1 they hold."""
    q, k, v, dout = inputs(case, dtype) if tensors is None else tensors
    exact = torch.promote_types(dtype, torch.float32)
    prepared = kernel.prepare(case.segments, CPU)
    out, lse = torch.full_like(dout, 7), torch.full((case.segments.lse_size,), 7, dtype=exact)
    buffers = Buffers(q, k, v, out, lse)
    kernel.forward(prepared, buffers, SCALE)
    dq = torch.full_like(q, 7)
    dk, dv = torch.ones(k.shape, dtype=exact), torch.ones(v.shape, dtype=exact)
    kernel.backward(prepared, buffers, Grads(dout, dq, dk, dv), SCALE)
    return Result(out=out, lse=lse, dq=dq, dk=dk - 1, dv=dv - 1)


def expected(
    case: Case,
    dtype: torch.dtype,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Result:
    """The same by a dense mask and autograd in fp64."""
    q, k, v, dout = (t.double() for t in (inputs(case, dtype) if tensors is None else tensors))
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    s = case.segments
    group = s.heads // s.kv_heads
    out, lse, loss = torch.full_like(dout, 7), [], torch.zeros((), dtype=torch.float64)
    dq = torch.full_like(q, 7)
    blocks = []
    for i in range(len(s)):
        rows = slice(s.q_start[i], s.q_start[i] + s.q_len[i])
        heads = slice(s.q_head[i], s.q_head[i] + s.heads)
        keys = slice(s.k_start[i], s.k_start[i] + s.k_len[i])
        kv = slice(s.kv_head[i], s.kv_head[i] + s.kv_heads)
        k_i, v_i = (t[keys, kv].repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows, heads], k_i) * SCALE
        position = torch.arange(s.q_len[i])[:, None] + (s.k_len[i] - s.q_len[i])
        if s.causal:
            scores = scores.masked_fill(torch.arange(s.k_len[i]) > position, -torch.inf)
        out_i = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v_i)
        out[rows, heads] = out_i.detach()
        lse.append(scores.logsumexp(-1).detach().flatten())
        loss = loss + (out_i * dout[rows, heads]).sum()
        blocks.append((rows, heads))
    loss.backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    for rows, heads in blocks:
        dq[rows, heads] = q.grad[rows, heads]
    return Result(out=out, lse=torch.cat(lse), dq=dq.detach(), dk=k.grad, dv=v.grad)


def assert_close(found: Result, due: Result, tolerance: float) -> None:
    """Every tensor within `tolerance`, absolute and relative to its own largest value."""
    for name in Result.__slots__:
        want = getattr(due, name)
        bound = tolerance * max(1.0, float(want.abs().max()))
        error = float((getattr(found, name).double() - want).abs().max())
        assert error <= bound, f"{name} is off by {error:.2e}, more than {bound:.2e}"
