"""CPU kernel: a loop over segments that calls PyTorch's flash-attention CPU operator on strided
views.

The operator aligns a causal mask top-left and computes whole 512-key blocks, so a segment is cut
into *pieces*: leaf squares on the diagonal (causal) and the rectangles before and between them (not
causal).

      keys ->  prefix      | a   | b   |
      rows a   r r r r r r | s   |     |      r  rectangle of the prefix
      rows b   r r r r r r | R R | s   |      R  rectangle between two halves       s  leaf square

Forward merges the pieces of a row by their log-sum-exp.  Backward needs no merge: with the row's
final output and LSE each piece yields its own share of dQ, dK and dV, which add.

Shape legend: T rows of a buffer, N heads, D key head dim, E value head dim, Q rows of one segment,
H its query heads, W the common width max(D, E) that the operator insists on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from libra.runtime.kernels.checks import Extents, check_buffers, check_gradients, check_segments
from libra.runtime.kernels.segments import Segments

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Piece(NamedTuple):
    """Rows [row, row + rows) of a segment against its keys [key, key + keys); `causal` pieces are
    square.
    """

    row: int
    rows: int
    key: int
    keys: int
    causal: bool


class _Task(NamedTuple):
    """One segment in plain integers."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    q_head: int
    kv_head: int
    lse_start: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    tasks: tuple[_Task, ...]
    heads: int
    kv_heads: int
    extents: Extents


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernel:
    """The `Kernel` of a CPU: fp64, fp32, bf16, fp16; any heads, head dims and strides; repeats
    itself bit for bit.
    """

    leaf: int = 128
    """Longest causal square that is not cut again, in rows."""

    widen: bool | None = None
    """Compute bf16 and fp16 in fp32.  None: where the processor has no fast matrix product for
    them.
    """

    def prepare(self, segments: Segments, device: torch.device) -> _Prepared:
        """Plain integers of every call to come.  ValueError for segments that no causal kernel
        could take.
        """
        if device.type != "cpu":
            raise ValueError(
                f"the cpu kernel was asked for device {device}; choose a kernel of that device"
            )
        extents = check_segments(segments)
        lse_start, tasks = 0, []
        columns = (segments.q_start, segments.q_len, segments.k_start, segments.k_len)
        for q_start, q_len, k_start, k_len, q_head, kv_head in zip(
            *(column.tolist() for column in (*columns, segments.q_head, segments.kv_head)),
            strict=True,
        ):
            pieces = cut(q_len, k_len, self.leaf)
            tasks.append(_Task(q_start, q_len, k_start, k_len, q_head, kv_head, lse_start, pieces))
            lse_start += q_len * segments.heads
        return _Prepared(tuple(tasks), segments.heads, segments.kv_heads, extents)

    def forward(
        self,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TNE: torch.Tensor,
        prepared: _Prepared,
        scale: float,
        out_TNE: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write the segments' rows of `out_TNE` and their flat `lse`."""
        if not prepared.tasks:
            return
        check_buffers(prepared.extents, q_TND, k_TND, v_TNE, out_TNE, lse)
        width, dtype = max(q_TND.shape[2], v_TNE.shape[2]), self._compute_dtype(q_TND.dtype)
        q_NTW, k_NTW, v_NTW = (_operand(t, width, dtype) for t in (q_TND, k_TND, v_TNE))
        out_NTE, value_dim = out_TNE.transpose(0, 1), v_TNE.shape[2]
        heads, kv_heads = prepared.heads, prepared.kv_heads
        for task in prepared.tasks:
            q_HQW = q_NTW.narrow(0, task.q_head, heads).narrow(1, task.q_start, task.q_len)
            k_HKW = k_NTW.narrow(0, task.kv_head, kv_heads).narrow(1, task.k_start, task.k_len)
            v_HKW = v_NTW.narrow(0, task.kv_head, kv_heads).narrow(1, task.k_start, task.k_len)
            out_HQE = out_NTE.narrow(0, task.q_head, heads).narrow(1, task.q_start, task.q_len)
            lse_HQ = lse.narrow(0, task.lse_start, heads * task.q_len).view(heads, task.q_len)
            if len(task.pieces) == 1:
                piece_out, piece_lse = _attend(
                    q_HQW[None], k_HKW[None], v_HKW[None], 0.0, task.pieces[0].causal, scale=scale
                )
                out_HQE.copy_(piece_out[0, :, :, :value_dim])
                lse_HQ.copy_(piece_lse[0])
            else:
                _attend_pieces(q_HQW, k_HKW, v_HKW, task.pieces, scale, out_HQE, lse_HQ)

    def backward(
        self,
        dout_TNE: torch.Tensor,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TNE: torch.Tensor,
        out_TNE: torch.Tensor,
        lse: torch.Tensor,
        prepared: _Prepared,
        scale: float,
        dq_TND: torch.Tensor,
        dk_TND: torch.Tensor,
        dv_TNE: torch.Tensor,
    ) -> None:
        """Write the segments' rows of `dq_TND`; add to `dk_TND` and `dv_TNE`, segment by segment in
        order.
        """
        if not prepared.tasks:
            return
        check_buffers(prepared.extents, q_TND, k_TND, v_TNE, out_TNE, lse)
        check_gradients(prepared.extents, q_TND, dout_TNE, out_TNE, dk_TND, dv_TNE)
        key_dim, value_dim = q_TND.shape[2], v_TNE.shape[2]
        width, dtype = max(key_dim, value_dim), self._compute_dtype(q_TND.dtype)
        dout_NTW, q_NTW, k_NTW, v_NTW, out_NTW = (
            _operand(t, width, dtype) for t in (dout_TNE, q_TND, k_TND, v_TNE, out_TNE)
        )
        dq_NTD, dk_NTD, dv_NTE = (t.transpose(0, 1) for t in (dq_TND, dk_TND, dv_TNE))
        heads, kv_heads = prepared.heads, prepared.kv_heads
        for task in prepared.tasks:
            dout_HQW, q_HQW, out_HQW, dq_HQD = (
                t.narrow(0, task.q_head, heads).narrow(1, task.q_start, task.q_len)
                for t in (dout_NTW, q_NTW, out_NTW, dq_NTD)
            )
            k_HKW, v_HKW, dk_HKD, dv_HKE = (
                t.narrow(0, task.kv_head, kv_heads).narrow(1, task.k_start, task.k_len)
                for t in (k_NTW, v_NTW, dk_NTD, dv_NTE)
            )
            lse_HQ = lse.narrow(0, task.lse_start, heads * task.q_len).view(heads, task.q_len)
            direct = len(task.pieces) == 1 or dq_HQD.dtype == lse.dtype
            sum_HQD = dq_HQD if direct else torch.empty(dq_HQD.shape, dtype=lse.dtype)
            for row, rows, key, keys, causal in task.pieces:
                dq, dk, dv = _attend_backward(
                    dout_HQW.narrow(1, row, rows)[None],
                    q_HQW.narrow(1, row, rows)[None],
                    k_HKW.narrow(1, key, keys)[None],
                    v_HKW.narrow(1, key, keys)[None],
                    out_HQW.narrow(1, row, rows)[None],
                    lse_HQ.narrow(1, row, rows)[None],
                    0.0,
                    causal,
                    scale=scale,
                )
                rows_HQD, dq_HQD_part = sum_HQD.narrow(1, row, rows), dq[0, :, :, :key_dim]
                if causal or rows == 1 == len(task.pieces):
                    rows_HQD.copy_(dq_HQD_part)
                else:
                    rows_HQD.add_(dq_HQD_part)
                dk_HKD.narrow(1, key, keys).add_(dk[0, :, :, :key_dim])
                dv_HKE.narrow(1, key, keys).add_(dv[0, :, :, :value_dim])
            if not direct:
                dq_HQD.copy_(sum_HQD)

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.bfloat16, torch.float16):
            return dtype
        widen = not _fast_matmul(dtype) if self.widen is None else self.widen
        return torch.float32 if widen else dtype


@lru_cache(maxsize=1 << 16)
def cut(q_len: int, k_len: int, leaf: int) -> tuple[Piece, ...]:
    """Pieces of a segment: first the diagonal squares, which cover every row once, then the
    rectangles.
    """
    if q_len == 1:
        return (Piece(0, 1, 0, k_len, False),)
    prefix = k_len - q_len
    squares: list[Piece] = []
    rectangles: list[Piece] = []
    if prefix:
        rectangles.append(Piece(0, q_len, 0, prefix, False))
    pending = [(0, q_len)]
    while pending:
        first, rows = pending.pop()
        if rows <= leaf:
            squares.append(Piece(first, rows, prefix + first, rows, True))
            continue
        upper = _half(rows)
        rectangles.append(Piece(first + upper, rows - upper, prefix + first, upper, False))
        pending += [(first + upper, rows - upper), (first, upper)]
    return (*squares, *rectangles)


def _half(rows: int) -> int:
    """About half of `rows`, a multiple of 32: the operator's smallest block of query rows."""
    return -(-rows // 64) * 32


def _attend_pieces(
    q_HQW: torch.Tensor,
    k_HKW: torch.Tensor,
    v_HKW: torch.Tensor,
    pieces: tuple[Piece, ...],
    scale: float,
    out_HQE: torch.Tensor,
    lse_HQ: torch.Tensor,
) -> None:
    """Attend piece by piece; sums are kept in the dtype of `lse_HQ` so that merging rounds only
    once.
    """
    direct = out_HQE.dtype == lse_HQ.dtype
    sum_HQE = out_HQE if direct else torch.empty(out_HQE.shape, dtype=lse_HQ.dtype)
    value_dim = out_HQE.shape[2]
    for row, rows, key, keys, causal in pieces:
        piece_out, piece_lse = _attend(
            q_HQW.narrow(1, row, rows)[None],
            k_HKW.narrow(1, key, keys)[None],
            v_HKW.narrow(1, key, keys)[None],
            0.0,
            causal,
            scale=scale,
        )
        rows_HQE, rows_lse = sum_HQE.narrow(1, row, rows), lse_HQ.narrow(1, row, rows)
        part_HQE, part_lse = piece_out[0, :, :, :value_dim], piece_lse[0]
        if causal:
            rows_HQE.copy_(part_HQE)
            rows_lse.copy_(part_lse)
        else:
            share = torch.sigmoid(part_lse - rows_lse)[..., None]
            rows_HQE.lerp_(part_HQE.to(rows_HQE.dtype), share)
            torch.logaddexp(rows_lse, part_lse, out=rows_lse)
    if not direct:
        out_HQE.copy_(sum_HQE)


def _operand(t_TND: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """`t_TND` as [N, T, W] of `dtype`, zero-padded to W: zeros change no score and add no output.

    The operator reads rows by their stride and elements back to back, so other strides are copied.
    """
    t_TND = t_TND.to(dtype)
    if t_TND.shape[2] < width:
        t_TND = torch.nn.functional.pad(t_TND, (0, width - t_TND.shape[2]))
    if t_TND.stride(2) != 1 or t_TND.stride(0) < width:
        t_TND = t_TND.contiguous()
    return t_TND.transpose(0, 1)


def _fast_matmul(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
