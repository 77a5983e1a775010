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

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.interface import Buffers, Grads, Prepared, check_buffers, check_call
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernel:
    """The `Kernel` of a CPU: fp64, fp32, bf16, fp16; any head dims and strides; repeats itself."""

    name: str = "cpu"

    leaf: int = 128
    """Longest causal square that is not cut again, in rows."""

    widen: bool | None = None
    """Compute bf16 and fp16 in fp32.  None: where the processor lacks fast products of them."""

    def prepare(self, call: AttentionCall, device: torch.device) -> Prepared[Task]:
        """Plain integers.  ValueError for segments that no causal kernel could take."""
        if device.type != "cpu":
            raise ValueError(f"the cpu kernel cannot serve device {device}; choose another kernel")
        extents = check_call(call)
        columns = (call.q_start, call.q_len, call.k_start, call.k_len, call.q_head, call.kv_head)
        tasks, lse_start = [], 0
        # Plain integers, because an array's elements cost more than a view's arithmetic.
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
        return Prepared(tuple(tasks), extents)

    @torch.no_grad()
    def forward(self, prepared: Prepared[Task], buffers: Buffers, scale: float) -> None:
        """Write the segments' rows of `out_TNE` and their flat `lse`."""
        check_buffers(prepared.extents, buffers)
        q_TND, k_TND, v_TNE, out_TNE, lse = buffers
        q_at, k_at, v_at = map(_blocks, self._operands(q_TND, k_TND, v_TNE))
        sum_TNE = _summable(out_TNE, lse)
        sum_at = _blocks(sum_TNE)
        for task in prepared.parts:
            queries, keys = task.queries, task.keys
            part_HRW, part_lse = cpu_flash_attention(
                q_at(queries), k_at(keys), v_at(keys), 0.0, task.causal, scale=scale
            )
            part_HRE = _first(part_HRW, v_TNE.shape[2])
            out, out_lse = sum_at(queries), _lse_at(lse, task)
            if task.opens:
                out.copy_(part_HRE)
                out_lse.copy_(part_lse)
            else:
                # Attention over some keys is merged into attention over others: with log-sum-exps
                # a and b, the weight of the new part is exp(b) / (exp(a) + exp(b)).
                out.lerp_(part_HRE.to(out.dtype), torch.sigmoid(part_lse - out_lse)[..., None])
                torch.logaddexp(out_lse, part_lse, out=out_lse)
        _copy_rows(out_TNE, sum_TNE, prepared)

    @torch.no_grad()
    def backward(
        self, prepared: Prepared[Task], buffers: Buffers, grads: Grads, scale: float
    ) -> None:
        """Write the segments' rows of `dq_TND`; add to `dk_TND` and `dv_TNE`, in segment order."""
        check_buffers(prepared.extents, buffers, grads)
        *tensors, lse = buffers
        key_dim, value_dim = buffers.q.shape[2], buffers.v.shape[2]
        sum_TND = _summable(grads.dq, lse)
        sum_at, dk_at, dv_at = map(_blocks, (sum_TND, grads.dk, grads.dv))
        dout_at, q_at, k_at, v_at, out_at = map(_blocks, self._operands(grads.dout, *tensors))
        for task in prepared.parts:
            queries, keys = task.queries, task.keys
            part_dq, part_dk, part_dv = cpu_flash_attention_backward(
                dout_at(queries),
                q_at(queries),
                k_at(keys),
                v_at(keys),
                out_at(queries),
                _lse_at(lse, task),
                0.0,
                task.causal,
                scale=scale,
            )
            # dQ is written by the first piece of its rows; dK and dV belong to all segments.
            dq = sum_at(queries)
            write = dq.copy_ if task.opens else dq.add_
            write(_first(part_dq, key_dim))
            dk_at(keys).add_(_first(part_dk, key_dim))
            dv_at(keys).add_(_first(part_dv, value_dim))
        _copy_rows(grads.dq, sum_TND, prepared)

    def _operands(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Tensors [T, N, D or E] as the operator takes them: zero-padded to W, which changes no
        score and adds no output, and in the dtype to compute in.

        The operator takes row strides but wants elements back to back and no overlapping rows; a
        view that does not conform (an expanded or transposed gradient) is copied.
        """
        width, dtype = max(t.shape[2] for t in tensors), self._compute_dtype(tensors[0].dtype)
        operands = []
        for t_TNW in tensors:
            t_TNW = t_TNW.to(dtype)
            if t_TNW.shape[2] < width:
                t_TNW = torch.nn.functional.pad(t_TNW, (0, width - t_TNW.shape[2]))
            if t_TNW.stride(2) != 1 or t_TNW.stride(0) < width:
                t_TNW = t_TNW.contiguous()
            operands.append(t_TNW)
        return operands

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.bfloat16, torch.float16):
            return dtype
        widen = not has_fast_products(dtype) if self.widen is None else self.widen
        return torch.float32 if widen else dtype


def cut(q_len: int, k_len: int, leaf: int, *, causal: bool = True) -> tuple[Piece, ...]:
    """Pieces of a segment: first the squares, which cover every row once, then the rectangles.

    A single row sees all its keys and is one rectangle, as is a segment that is not causal.
    """
    # The operator's mask is top-left: right for a square, wrong for a single row with a prefix.
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
        # The upper half comes next, so that squares stand in the order of their rows.
        pending += [(row + upper, lower), (row, upper)]
    return (*squares, *rectangles)


def _blocks(buffer_TNW: torch.Tensor) -> Callable[[tuple[int, int, int, int]], torch.Tensor]:
    """Views of a buffer by (first head, heads, first row, rows): [1, heads, rows, W].

    Segments may be a few rows long, so strides are read once a buffer and not once a view.
    """
    start, width = int(buffer_TNW.storage_offset()), buffer_TNW.shape[2]
    row_stride, head_stride, element_stride = buffer_TNW.stride()
    strides = (0, head_stride, row_stride, element_stride)

    def view(at: tuple[int, int, int, int]) -> torch.Tensor:
        head, heads, row, rows = at
        offset = start + row * row_stride + head * head_stride
        return buffer_TNW.as_strided((1, heads, rows, width), strides, offset)

    return view


def _first(t_HRW: torch.Tensor, dim: int) -> torch.Tensor:
    """The first `dim` elements of each head; the others are padding."""
    return t_HRW if t_HRW.shape[-1] == dim else t_HRW[..., :dim]


def _lse_at(lse: torch.Tensor, task: Task) -> torch.Tensor:
    """[1, heads, rows] of the flat LSE."""
    _, heads, _, rows = task.queries
    offset = lse.storage_offset() + task.lse_start
    return lse.as_strided((1, heads, rows), (0, task.lse_stride, 1), offset)


def _summable(t_TNX: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """`t_TNX`, or an empty buffer like it in the dtype of `lse`, so that sums round only once."""
    return t_TNX if t_TNX.dtype == lse.dtype else torch.empty(t_TNX.shape, dtype=lse.dtype)


def _copy_rows(to_TNX: torch.Tensor, from_TNX: torch.Tensor, prepared: Prepared[Task]) -> None:
    """Copy the segments' rows, unless the sums were made in place."""
    if to_TNX is from_TNX:
        return
    to_at, from_at = _blocks(to_TNX), _blocks(from_TNX)
    for task in prepared.parts:
        if task.opens:  # pieces that open cover every row once
            to_at(task.queries).copy_(from_at(task.queries))
