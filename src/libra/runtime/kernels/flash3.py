"""FlashAttention 3: the `flash_attn_interface` module, for Hopper GPUs.

Signatures read at each change between August 2025, when `return_attn_probs` came back, and August
2026.  In November 2025 the backward became a custom operator and its `causal` argument `is_causal`;
`sequed_q` and `sequed_k` are spelt so in both.  The LSE of packed rows is (heads, rows).
"""

from __future__ import annotations

import inspect

import flash_attn_interface
import torch

from libra.runtime.kernels.build import PackedKernel, deterministic
from libra.runtime.kernels.packed import Call

Tensor = torch.Tensor

if (
    "return_attn_probs"
    not in inspect.signature(flash_attn_interface.flash_attn_varlen_func).parameters
):
    raise ImportError(
        "flash_attn_interface cannot return the LSE; one from September 2025 or later can"
    )


def kernel() -> PackedKernel:
    """The `Kernel` of FlashAttention 3."""
    return PackedKernel(
        name="flash3",
        attend=_attend,
        attend_backward=_attend_backward,
        unequal_dims=((192, 128),),
    )


def _attend(
    q_RNW: Tensor, k_KNW: Tensor, v_KNW: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor]:
    out_RNW, lse_NR = flash_attn_interface.flash_attn_varlen_func(
        q=q_RNW,
        k=k_KNW,
        v=v_KNW,
        cu_seqlens_q=call.cu_q,
        cu_seqlens_k=call.cu_k,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        softmax_scale=scale,
        causal=call.causal,
        return_attn_probs=True,
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
    function = flash_attn_interface._flash_attn_backward
    causal = "causal" if "causal" in inspect.signature(function).parameters else "is_causal"
    function(
        dout=dout_RNW,
        q=q_RNW,
        k=k_KNW,
        v=v_KNW,
        out=out_RNW,
        softmax_lse=lse_NR,
        cu_seqlens_q=call.cu_q,
        cu_seqlens_k=call.cu_k,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        dq=dq_RNW,
        dk=dk_KNW,
        dv=dv_KNW,
        softmax_scale=scale,
        deterministic=deterministic(),
        **{causal: call.causal},
    )
    return dq_RNW, dk_KNW, dv_KNW
