"""CPU kernel: PyTorch's flash-attention CPU operator on strided views, segment by segment.

The operator aligns a causal mask top-left and computes whole 512-key blocks, masked or not.  So a
segment is cut into pieces: small causal squares on the diagonal and full rectangles to their left.

      keys ->  prefix      | a   | b   |
      rows a   r r r r r r | s   |     |      r  rectangle of the prefix
      rows b   r r r r r r | R R | s   |      R  rectangle between two halves       s  causal square

Forward merges the pieces of a row by their log-sum-exp.  Backward needs no merge: given a row's
final output and LSE, each piece yields its own share of dQ, dK and dV, and shares add.

Shape legend: T rows of a buffer, N its heads, H heads of a piece, R its query rows, K its keys,
D key head dim, E value head dim, W the common width max(D, E) that the operator asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.interface import (
    Buffers,
    Extents,
    Grads,
    check_buffers,
    check_call,
    check_grads,
)
from libra.runtime.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    has_fast_products,
)


class Piece(NamedTuple):
    """Query rows [row, row + rows) against keys [key, key + keys), counted within a segment."""

    row: int
    rows: int
    key: int
    keys: int
    causal: bool
    """A causal piece is square."""
    opens: bool
    """The first piece of its rows; later ones merge with it."""


class Task(NamedTuple):
    """One piece in plain integers, counted within the buffers."""

    queries: tuple[int, int, int, int]
    """(first head, heads, first row, rows)."""
    keys: tuple[int, int, int, int]
    """The same of the keys."""
    lse_start: int
    """First element of the flat LSE; its heads lie `lse_stride` apart."""
    lse_stride: int
    causal: bool
    opens: bool


@dataclass(frozen=True, slots=True, eq=False)
class CpuPrepared:
    """The tasks of one attention call."""

    tasks: tuple[Task, ...]
    extents: Extents


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernel:
    """The `Kernel` of a CPU: fp64, fp32, bf16, fp16; any head dims and strides; repeats itself."""

    name: str = "cpu"

    leaf: int = 128
    """Longest causal square that is not cut again, in rows."""

    widen: bool | None = None
    """Compute bf16 and fp16 in fp32.  None: where the processor lacks fast products of them."""

    def prepare(self, call: AttentionCall, device: torch.device) -> CpuPrepared:
        """Plain integers.  ValueError for segments that no causal kernel could take."""
        if device.type != "cpu":
            raise ValueError(f"the cpu kernel cannot serve device {device}; choose another kernel")
        extents = check_call(call)
        columns = (call.q_start, call.q_len, call.k_start, call.k_len, call.q_head, call.kv_head)
        tasks, lse_start = [], 0
        for q_start, q_len, k_start, k_len, q_head, kv_head in np.stack(columns, axis=1).tolist():
            tasks += [
                Task(
                    queries=(q_head, call.heads, q_start + piece.row, piece.rows),
                    keys=(kv_head, call.kv_heads, k_start + piece.key, piece.keys),
                    lse_start=lse_start + piece.row,
                    lse_stride=q_len,
                    causal=piece.causal,
                    opens=piece.opens,
                )
                for piece in cut(q_len, k_len, self.leaf, causal=call.causal)
            ]
            lse_start += q_len * call.heads
        return CpuPrepared(tuple(tasks), extents)

    @torch.no_grad()
    def forward(self, prepared: CpuPrepared, buffers: Buffers, scale: float) -> None:
        """Write the segments' rows of `out_TNE` and their flat `lse`."""
        if not prepared.tasks:
            return
        check_buffers(prepared.extents, buffers)
        q_TND, k_TND, v_TNE, out_TNE, lse = buffers
        width, dtype = max(q_TND.shape[2], v_TNE.shape[2]), self._compute_dtype(q_TND.dtype)
        q, k, v = (_Blocks.of(_operand(t, width, dtype)) for t in (q_TND, k_TND, v_TNE))
        sum_TNE = _summable(out_TNE, lse)
        out = _Blocks.of(sum_TNE)
        for task in prepared.tasks:
            part_HRW, part_lse_HR = cpu_flash_attention(
                q.at(*task.queries),
                k.at(*task.keys),
                v.at(*task.keys),
                0.0,
                task.causal,
                scale=scale,
            )
            part_HRE = _first(part_HRW, v_TNE.shape[2])
            _merge(out.at(*task.queries), _lse_at(lse, task), part_HRE, part_lse_HR, task.opens)
        _copy_rows(out_TNE, sum_TNE, prepared)

    @torch.no_grad()
    def backward(self, prepared: CpuPrepared, buffers: Buffers, grads: Grads, scale: float) -> None:
        """Write the segments' rows of `dq_TND`; add to `dk_TND` and `dv_TNE`, in segment order."""
        if not prepared.tasks:
            return
        check_buffers(prepared.extents, buffers)
        check_grads(prepared.extents, buffers, grads)
        q_TND, k_TND, v_TNE, out_TNE, lse = buffers
        dout_TNE, dq_TND, dk_TND, dv_TNE = grads
        key_dim, value_dim = q_TND.shape[2], v_TNE.shape[2]
        width, dtype = max(key_dim, value_dim), self._compute_dtype(q_TND.dtype)
        dout, q, k, v, out = (
            _Blocks.of(_operand(t, width, dtype)) for t in (dout_TNE, q_TND, k_TND, v_TNE, out_TNE)
        )
        sum_TND = _summable(dq_TND, lse)
        dq, dk, dv = (_Blocks.of(t) for t in (sum_TND, dk_TND, dv_TNE))
        for task in prepared.tasks:
            queries, keys = task.queries, task.keys
            part_dq, part_dk, part_dv = cpu_flash_attention_backward(
                dout.at(*queries),
                q.at(*queries),
                k.at(*keys),
                v.at(*keys),
                out.at(*queries),
                _lse_at(lse, task),
                0.0,
                task.causal,
                scale=scale,
            )
            if task.opens:
                dq.at(*queries).copy_(_first(part_dq, key_dim))
            else:
                dq.at(*queries).add_(_first(part_dq, key_dim))
            dk.at(*keys).add_(_first(part_dk, key_dim))
            dv.at(*keys).add_(_first(part_dv, value_dim))
        _copy_rows(dq_TND, sum_TND, prepared)

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.bfloat16, torch.float16):
            return dtype
        widen = not has_fast_products(dtype) if self.widen is None else self.widen
        return torch.float32 if widen else dtype


def cut(q_len: int, k_len: int, leaf: int, *, causal: bool = True) -> tuple[Piece, ...]:
    """Pieces of a segment: first the squares, which cover every row once, then the rectangles.

    A single row sees all its keys and is one rectangle, as is a segment that is not causal.
    """
    if q_len == 1 or not causal:
        return (Piece(0, q_len, 0, k_len, causal=False, opens=True),)
    prefix = k_len - q_len
    squares, rectangles = [], []
    if prefix:
        rectangles.append(Piece(0, q_len, 0, prefix, causal=False, opens=False))
    pending = [(0, q_len)]
    while pending:
        row, rows = pending.pop()
        if rows <= leaf:
            squares.append(Piece(row, rows, prefix + row, rows, causal=True, opens=True))
            continue
        # About half, if it can be in whole blocks of the operator's 32 query rows.
        upper = -(-rows // 64) * 32 if rows > 32 else rows // 2
        lower = rows - upper
        rectangles.append(Piece(row + upper, lower, prefix + row, upper, causal=False, opens=False))
        pending += [(row + upper, lower), (row, upper)]
    return (*squares, *rectangles)


class _Blocks(NamedTuple):
    """Heads and rows of one buffer as the operator wants them, each for the price of one view."""

    buffer_TNW: torch.Tensor
    offset: int
    row_stride: int
    head_stride: int
    strides: tuple[int, int, int, int]

    @staticmethod
    def of(buffer_TNW: torch.Tensor) -> _Blocks:
        row, head, element = buffer_TNW.stride()
        strides = (0, head, row, element)
        return _Blocks(buffer_TNW, int(buffer_TNW.storage_offset()), row, head, strides)

    def at(self, head: int, heads: int, row: int, rows: int) -> torch.Tensor:
        """[1, heads, rows, W]"""
        offset = self.offset + row * self.row_stride + head * self.head_stride
        shape = (1, heads, rows, self.buffer_TNW.shape[2])
        return self.buffer_TNW.as_strided(shape, self.strides, offset)


def _lse_at(lse: torch.Tensor, task: Task) -> torch.Tensor:
    """[1, heads, rows] of the flat LSE."""
    _, heads, _, rows = task.queries
    offset = lse.storage_offset() + task.lse_start
    return lse.as_strided((1, heads, rows), (0, task.lse_stride, 1), offset)


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    opens: bool,
) -> None:
    """Merge attention over some keys into `out` and `lse`, attention over others, in place."""
    if opens:
        out.copy_(part)
        lse.copy_(part_lse)
        return
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def _first(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The first `dim` elements of each head: the rest is padding."""
    return t if t.shape[3] == dim else t[..., :dim]


def _summable(t_TNX: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """`t_TNX`, or an empty buffer like it in the dtype of `lse`, so that sums round only once."""
    if t_TNX.dtype == lse.dtype:
        return t_TNX
    return torch.empty(t_TNX.shape, dtype=lse.dtype)


def _copy_rows(to_TNX: torch.Tensor, from_TNX: torch.Tensor, prepared: CpuPrepared) -> None:
    """Copy the segments' rows, unless the sums were made in place."""
    if to_TNX is from_TNX:
        return
    to, source = _Blocks.of(to_TNX), _Blocks.of(from_TNX)
    for task in prepared.tasks:
        if task.opens:  # pieces that open cover every row once
            to.at(*task.queries).copy_(source.at(*task.queries))


def _operand(t_TND: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """`t_TND` in `dtype`, zero-padded to W: zeros change no score and add no output.

    The operator takes row strides but wants elements back to back and no overlapping rows; a view
    that does not conform (an expanded or transposed gradient) is copied.
    """
    t_TND = t_TND.to(dtype)
    if t_TND.shape[2] < width:
        t_TND = torch.nn.functional.pad(t_TND, (0, width - t_TND.shape[2]))
    if t_TND.stride(2) != 1 or t_TND.stride(0) < width:
        t_TND = t_TND.contiguous()
    return t_TND
