"""CPU kernel: PyTorch's flash-attention CPU operator on strided views, segment by segment.

The operator aligns a causal mask top-left and computes whole 512-key blocks, masked or not.  So a
segment is cut into pieces: small causal squares on the diagonal and full rectangles left of them.

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

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Piece(NamedTuple):
    """Query rows [row, row + rows) against keys [key, key + keys), counted within a segment."""

    row: int
    rows: int
    key: int
    keys: int
    causal: bool
    """A causal piece is square."""
    opens: bool
    """It is the first that its rows meet; later ones merge with it."""


class Task(NamedTuple):
    """One segment in plain integers."""

    q_start: int
    q_len: int
    k_start: int
    q_head: int
    kv_head: int
    lse_start: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CpuPrepared:
    """The tasks of one launch."""

    tasks: tuple[Task, ...]
    heads: int
    kv_heads: int
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
        tasks, lse_start = [], 0
        for index in range(len(call)):
            q_len, k_len = int(call.q_len[index]), int(call.k_len[index])
            tasks.append(
                Task(
                    q_start=int(call.q_start[index]),
                    q_len=q_len,
                    k_start=int(call.k_start[index]),
                    q_head=int(call.q_head[index]),
                    kv_head=int(call.kv_head[index]),
                    lse_start=lse_start,
                    pieces=cut(q_len, k_len, self.leaf, causal=call.causal),
                )
            )
            lse_start += q_len * call.heads
        return CpuPrepared(tuple(tasks), call.heads, call.kv_heads, extents)

    @torch.no_grad()
    def forward(self, prepared: CpuPrepared, buffers: Buffers, scale: float) -> None:
        """Write the segments' rows of `out_TNE` and their flat `lse`."""
        if not prepared.tasks:
            return
        check_buffers(prepared.extents, buffers)
        q_TND, k_TND, v_TNE, out_TNE, lse = buffers
        heads, kv_heads = prepared.heads, prepared.kv_heads
        width, dtype = max(q_TND.shape[2], v_TNE.shape[2]), self._compute_dtype(q_TND.dtype)
        q, k, v = (_Blocks.of(_operand(t, width, dtype)) for t in (q_TND, k_TND, v_TNE))
        sum_TNE = _summable(out_TNE, lse)
        out = _Blocks.of(sum_TNE)
        for task in prepared.tasks:
            for piece in task.pieces:
                row, key = task.q_start + piece.row, task.k_start + piece.key
                part_HRW, part_lse_HR = _attend(
                    q.at(task.q_head, heads, row, piece.rows),
                    k.at(task.kv_head, kv_heads, key, piece.keys),
                    v.at(task.kv_head, kv_heads, key, piece.keys),
                    0.0,
                    piece.causal,
                    scale=scale,
                )
                _merge(
                    out.at(task.q_head, heads, row, piece.rows),
                    _lse_at(lse, task, piece, heads),
                    _first(part_HRW, v_TNE.shape[2]),
                    part_lse_HR,
                    piece.opens,
                )
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
        heads, kv_heads = prepared.heads, prepared.kv_heads
        key_dim, value_dim = q_TND.shape[2], v_TNE.shape[2]
        width, dtype = max(key_dim, value_dim), self._compute_dtype(q_TND.dtype)
        dout, q, k, v, out = (
            _Blocks.of(_operand(t, width, dtype)) for t in (dout_TNE, q_TND, k_TND, v_TNE, out_TNE)
        )
        sum_TND = _summable(dq_TND, lse)
        dq, dk, dv = (_Blocks.of(t) for t in (sum_TND, dk_TND, dv_TNE))
        for task in prepared.tasks:
            for piece in task.pieces:
                queries = (task.q_head, heads, task.q_start + piece.row, piece.rows)
                keys = (task.kv_head, kv_heads, task.k_start + piece.key, piece.keys)
                part_dq, part_dk, part_dv = _attend_backward(
                    dout.at(*queries),
                    q.at(*queries),
                    k.at(*keys),
                    v.at(*keys),
                    out.at(*queries),
                    _lse_at(lse, task, piece, heads),
                    0.0,
                    piece.causal,
                    scale=scale,
                )
                if piece.opens:
                    dq.at(*queries).copy_(_first(part_dq, key_dim))
                else:
                    dq.at(*queries).add_(_first(part_dq, key_dim))
                dk.at(*keys).add_(_first(part_dk, key_dim))
                dv.at(*keys).add_(_first(part_dv, value_dim))
        _copy_rows(dq_TND, sum_TND, prepared)

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.bfloat16, torch.float16):
            return dtype
        widen = not _fast_product(dtype) if self.widen is None else self.widen
        return torch.float32 if widen else dtype


def cut(q_len: int, k_len: int, leaf: int, *, causal: bool = True) -> tuple[Piece, ...]:
    """Overlaps of a segment: first the squares, which cover every row once, then the rectangles.

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


def _lse_at(lse: torch.Tensor, task: Task, piece: Piece, heads: int) -> torch.Tensor:
    """[1, heads, rows] of the flat LSE."""
    offset = lse.storage_offset() + task.lse_start + piece.row
    return lse.as_strided((1, heads, piece.rows), (0, task.q_len, 1), offset)


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    opens: bool,
) -> None:
    """Fold attention over some keys into `out` and `lse`, attention over others; both in place."""
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
        queries = (task.q_head, prepared.heads, task.q_start, task.q_len)
        to.at(*queries).copy_(source.at(*queries))


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


def _fast_product(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
