"""A `Kernel` made of a FlashAttention build's own two functions: gather, call, scatter.

Nothing here waits for the device: lengths are plain integers and index tensors are uploaded once.

Shape legend: T rows of a buffer, R packed query rows of a call, K its packed key rows, N heads,
D key head dim, E value head dim, W width of a head as the build takes it, for keys or for values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from libra.runtime.kernels.interface import (
    AttentionCall,
    Buffers,
    Grads,
    check_buffers,
    check_grads,
)
from libra.runtime.kernels.packed import Call, Packed, pack

Tensor = torch.Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Call, float], tuple[Tensor, Tensor]]
"""(q_RNW, k_KNW, v_KNW, call, scale) -> (out_RNW, lse_NR), fp32 LSE, causal
bottom-right where the call is causal.
"""

AttendBackward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call, float], tuple[Tensor, Tensor, Tensor]
]
"""(dout_RNW, q_RNW, k_KNW, v_KNW, out_RNW, lse_NR, call, scale) -> (dq_RNW, dk_KNW, dv_KNW)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKernel:
    """The `Kernel` of a library that takes packed rows: bf16 and fp16, head dims to 256."""

    name: str
    attend: Attend
    attend_backward: AttendBackward
    unequal_dims: Collection[tuple[int, int]] = ()
    """(key, value) head dims that it takes as they are; others are zero-padded to one width."""
    duplication: int = 4
    """About how many copies of the keys a call may gather.  Fewer: less memory, smaller calls."""

    def prepare(self, call: AttentionCall, device: torch.device) -> Packed:
        """Calls and index tensors.  ValueError for segments that no causal kernel could take."""
        return pack(call, device, self.duplication)

    @torch.no_grad()
    def forward(self, prepared: Packed, buffers: Buffers, scale: float) -> None:
        """Write the segments' rows of `out_TNE` and their flat `lse`.

        ValueError for buffers, dtypes and head dims that the build cannot take.
        """
        if not prepared.calls:
            return
        check_buffers(prepared.extents, buffers)
        q_TND, k_TND, v_TNE, out_TNE, lse = buffers
        key_width, value_width = self._widths(q_TND, v_TNE)
        for call in prepared.calls:
            out_RNW, lse_NR = self.attend(
                _widen(call.q.take(q_TND), key_width),
                _widen(call.k.take(k_TND), key_width),
                _widen(call.k.take(v_TNE), value_width),
                call,
                scale,
            )
            if lse_NR.shape != (call.q.heads, call.q.count):
                raise RuntimeError(
                    f"{self.name} returned an LSE of {tuple(lse_NR.shape)}, not (heads, rows) "
                    f"= {(call.q.heads, call.q.count)}: this version of it is not supported"
                )
            call.q.put(out_TNE, out_RNW[..., : v_TNE.shape[2]])
            lse.index_copy_(0, call.lse_at, lse_NR.flatten())

    @torch.no_grad()
    def backward(self, prepared: Packed, buffers: Buffers, grads: Grads, scale: float) -> None:
        """Write the segments' rows of `dq_TND`; add to `dk_TND` and `dv_TNE`, set by set."""
        if not prepared.calls:
            return
        check_buffers(prepared.extents, buffers)
        check_grads(prepared.extents, buffers, grads)
        q_TND, k_TND, v_TNE, out_TNE, lse = buffers
        dout_TNE, dq_TND, dk_TND, dv_TNE = grads
        key_dim, value_dim = q_TND.shape[2], v_TNE.shape[2]
        key_width, value_width = self._widths(q_TND, v_TNE)
        for call in prepared.calls:
            dq_RNW, dk_KNW, dv_KNW = self.attend_backward(
                _widen(call.q.take(dout_TNE), value_width),
                _widen(call.q.take(q_TND), key_width),
                _widen(call.k.take(k_TND), key_width),
                _widen(call.k.take(v_TNE), value_width),
                _widen(call.q.take(out_TNE), value_width),
                lse.index_select(0, call.lse_at).view(call.q.heads, call.q.count),
                call,
                scale,
            )
            call.q.put(dq_TND, dq_RNW[..., :key_dim])
            for first, last, rows in call.k_sets:
                rows.add(dk_TND, dk_KNW[first:last, :, :key_dim])
                rows.add(dv_TNE, dv_KNW[first:last, :, :value_dim])

    def _widths(self, q_TND: Tensor, v_TNE: Tensor) -> tuple[int, int]:
        if q_TND.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{self.name} computes bf16 and fp16, not {q_TND.dtype}: cast q, k and v"
            )
        dims = (q_TND.shape[2], v_TNE.shape[2])
        if dims in self.unequal_dims:
            return dims
        width = -(-max(dims) // 8) * 8
        if width > 256:
            raise ValueError(
                f"head dims {dims[0]} (key) and {dims[1]} (value) need a kernel {width} wide; "
                f"{self.name} ends at 256"
            )
        return width, width


def deterministic() -> bool:
    """Whether the user asked PyTorch for algorithms that repeat themselves."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _widen(t_RND: Tensor, width: int) -> Tensor:
    """Zero-padded to `width`, elements of a head back to back: zeros change no score or output."""
    if t_RND.shape[2] < width:
        return torch.nn.functional.pad(t_RND, (0, width - t_RND.shape[2]))
    return t_RND if t_RND.stride(2) == 1 else t_RND.contiguous()
