"""FlashAttention 2: the `flash_attn` package from 2.7, for Ampere GPUs and newer.

Signatures read in releases 2.7.0 to 2.8.4.  The LSE of packed rows is (heads, rows) since 2.6, and
window sizes are two arguments since 2.7.  The backward kernel reads `rng_state` even without
dropout, so one must be given.
"""

from __future__ import annotations

import flash_attn
import torch
from flash_attn import flash_attn_interface

from libra.runtime.kernels.build import PackedKernel, deterministic
from libra.runtime.kernels.packed import Call

Tensor = torch.Tensor

if tuple(int(part) for part in flash_attn.__version__.split(".")[:2]) < (2, 7):
    raise ImportError(f"flash_attn is {flash_attn.__version__}; 2.7 or later is needed")


def kernel() -> PackedKernel:
    """The `Kernel` of FlashAttention 2."""
    return PackedKernel(name="flash2", attend=_attend, attend_backward=_attend_backward)


def _attend(
    q_RNW: Tensor, k_KNW: Tensor, v_KNW: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor]:
    out_RNW, lse_NR, *_ = flash_attn_interface._flash_attn_varlen_forward(
        q=q_RNW,
        k=k_KNW,
        v=v_KNW,
        cu_seqlens_q=call.cu_q,
        cu_seqlens_k=call.cu_k,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=call.causal,
    )
    return out_RNW, lse_NR


def _attend_backward(
    dout_RNW: Tensor,
    q_RNW: Tensor,
    k_KNW: Tensor,
    v_KNW: Tensor,
    out_RNW: Tensor,
    lse_NR: Tensor,
    call: Call,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq_RNW, dk_KNW, dv_KNW = (t.new_empty(t.shape) for t in (q_RNW, k_KNW, v_KNW))
    flash_attn_interface._flash_attn_varlen_backward(
        dout=dout_RNW,
        q=q_RNW,
        k=k_KNW,
        v=v_KNW,
        out=out_RNW,
        softmax_lse=lse_NR,
        dq=dq_RNW,
        dk=dk_KNW,
        dv=dv_KNW,
        cu_seqlens_q=call.cu_q,
        cu_seqlens_k=call.cu_k,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=call.causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=deterministic(),
        rng_state=torch.zeros(2, dtype=torch.int64, device=q_RNW.device),
    )
    return dq_RNW, dk_KNW, dv_KNW
