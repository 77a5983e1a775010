"""A kernel against dense fp64 attention, on segments as plans make them.

Shape legend: T rows of a buffer, N its heads, D key dim, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.interface import Buffers, Grads, Kernel

POISON = 7.0
"""What outputs hold before: rows that no segment writes must still hold it."""
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""Most relative error, norm over norm: rounding of the dtype, several times over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launch and the buffers that it addresses."""

    name: str
    rows: tuple[tuple[int, int, int, int, int, int], ...]
    """(q_start, q_len, k_start, k_len, q_head, kv_head) of every segment."""
    heads: tuple[int, int]
    """Query and key/value heads of a segment."""
    held: tuple[int, int]
    """Those of the buffers."""
    dims: tuple[int, int]
    """Of key and value heads."""

    @property
    def segments(self) -> AttentionCall:
        """As kernels take them."""
        columns = np.array(self.rows, dtype=np.int64).T
        return AttentionCall(*columns, *self.heads)


def whole_samples(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> Case:
    """Samples that lie back to back, at all heads."""
    starts = np.cumsum((0, *lengths))[:-1].tolist()
    rows = tuple((s, n, s, n, 0, 0) for s, n in zip(starts, lengths, strict=True))
    return Case(
        name=f"samples {lengths}, heads {heads}/{kv_heads}, dim {dim}",
        rows=rows,
        heads=(heads, kv_heads),
        held=(heads, kv_heads),
        dims=(dim, dim),
    )


def blocks_of_head_groups(length: int, block: int, dim: int, value_dim: int) -> Case:
    """Late blocks of one sample at two head groups in turn, which read one prefix: key rows are
    shared, head ranges differ, rows lie scattered.
    """
    rows, at = [], 3
    for index, stop in enumerate(range(length, block, -2 * block)):
        head_group = index % 2
        rows.append((at, block, 5, stop, 2 * head_group, head_group))
        at += block + 1
    rows.append((at, 1, 5, 1, 0, 0))  # a first token alone
    return Case(
        name=f"blocks of {block} of {length} at two head groups, dims {dim}/{value_dim}",
        rows=tuple(rows),
        heads=(2, 1),
        held=(5, 2),
        dims=(dim, value_dim),
    )


def cases(small: bool) -> list[Case]:
    """What every kernel is checked on."""
    most = 300 if small else 3000
    return [
        whole_samples((most, 1, 64, most // 3, 17), 4, 4, 64),
        whole_samples((most, 129, 128, 127), 8, 2, 128),
        blocks_of_head_groups(most, most // 10, 128, 128),
        blocks_of_head_groups(most, most // 10, 64, 128),
        blocks_of_head_groups(most // 2, 16, 40, 24),
    ]


def check_kernel(
    kernel: Kernel, case: Case, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Relative errors of out, LSE, dq, dk and dv; inf where rows outside were touched."""
    segments = case.segments
    draw = torch.Generator(device="cpu").manual_seed(len(case.rows))
    q_rows = int((segments.q_start + segments.q_len).max()) + 2
    k_rows = int((segments.k_start + segments.k_len).max()) + 1

    def tensor(rows: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(rows, heads, dim, generator=draw).to(device, dtype)

    (q_heads, kv_heads), (dim, value_dim), scale = case.held, case.dims, case.dims[0] ** -0.5
    q_TND, k_TND = tensor(q_rows, q_heads, dim), tensor(k_rows, kv_heads, dim)
    v_TNE, dout_TNE = tensor(k_rows, kv_heads, value_dim), tensor(q_rows, q_heads, value_dim)
    prepared = kernel.prepare(segments, device)
    out_TNE, dq_TND = torch.full_like(dout_TNE, POISON), torch.full_like(q_TND, POISON)
    dk_TND = torch.ones(k_TND.shape, device=device)
    dv_TNE = torch.ones(v_TNE.shape, device=device)
    lse = torch.full((segments.lse_size,), torch.nan, device=device)
    buffers = Buffers(q_TND, k_TND, v_TNE, out_TNE, lse)
    kernel.forward(prepared, buffers, scale)
    kernel.backward(prepared, buffers, Grads(dout_TNE, dq_TND, dk_TND, dv_TNE), scale)
    due = _dense(case, segments, q_TND, k_TND, v_TNE, dout_TNE, scale)
    found = {"out": out_TNE, "lse": lse, "dq": dq_TND, "dk": dk_TND - 1, "dv": dv_TNE - 1}
    return {name: _error(found[name], due[name]) for name in found}


def _dense(
    case: Case,
    segments: AttentionCall,
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    dout_TNE: torch.Tensor,
    scale: float,
) -> dict[str, torch.Tensor]:
    """The same in fp64 by a mask and autograd."""
    q, k, v = (t.double().requires_grad_() for t in (q_TND, k_TND, v_TNE))
    out = torch.full(dout_TNE.shape, POISON, dtype=torch.float64, device=q.device)
    written = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
    loss, every_lse = torch.zeros((), dtype=torch.float64, device=q.device), []
    q_heads, kv_heads = case.heads
    for q_start, q_len, k_start, k_len, q_head, kv_head in case.rows:
        rows, heads = slice(q_start, q_start + q_len), slice(q_head, q_head + q_heads)
        keys, kv = slice(k_start, k_start + k_len), slice(kv_head, kv_head + kv_heads)
        k_i, v_i = (t[keys, kv].repeat_interleave(q_heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows, heads], k_i) * scale
        last = torch.arange(q_len, device=q.device)[:, None] + (k_len - q_len)
        scores = scores.masked_fill(torch.arange(k_len, device=q.device) > last, -torch.inf)
        out_i = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v_i)
        out[rows, heads], written[rows, heads] = out_i.detach(), True
        every_lse.append(scores.logsumexp(-1).detach().flatten())
        loss = loss + (out_i * dout_TNE[rows, heads].double()).sum()
    loss.backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    dq = torch.where(written[..., None], q.grad, POISON)
    return {"out": out, "lse": torch.cat(every_lse), "dq": dq, "dk": k.grad, "dv": v.grad}


def _error(found: torch.Tensor, due: torch.Tensor) -> float:
    untouched = due == POISON
    if bool((found.double()[untouched] != POISON).any()):
        return float("inf")
    wrong = (found.double() - due)[~untouched].norm() / due[~untouched].norm()
    return float(wrong) if bool(wrong.isfinite()) else float("inf")
