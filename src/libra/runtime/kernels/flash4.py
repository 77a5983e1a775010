"""FlashAttention 4: `flash_attn.cute` (the `flash-attn-4` package), for Hopper and Blackwell GPUs.

Signatures read in releases 4.0.0 beta 0 to beta 27; the LSE of packed rows is (heads, rows) in all.
The backward repeats itself on request, except on consumer Blackwell and before beta 5 on Hopper.
"""

from __future__ import annotations

import inspect

import torch
from flash_attn.cute import interface

from libra.runtime.kernels.build import PackedKernel, deterministic
from libra.runtime.kernels.packed import Call

Tensor = torch.Tensor

if "return_lse" not in inspect.signature(interface.flash_attn_varlen_func).parameters:
    raise ImportError("flash_attn.cute cannot return the LSE; 4.0.0 beta 0 or later can")


def kernel() -> PackedKernel:
    """The `Kernel` of FlashAttention 4."""
    return PackedKernel(
        name="flash4",
        attend=_attend,
        attend_backward=_attend_backward,
        unequal_dims=((192, 128),),
    )


def _attend(
    q_RNW: Tensor, k_KNW: Tensor, v_KNW: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor]:
    out_RNW, lse_NR = interface.flash_attn_varlen_func(
        q=q_RNW,
        k=k_KNW,
        v=v_KNW,
        cu_seqlens_q=call.cu_q,
        cu_seqlens_k=call.cu_k,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        softmax_scale=scale,
        causal=call.causal,
        return_lse=True,
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
    dq_RNW, dk_KNW, dv_KNW = interface._flash_attn_bwd(
        q=q_RNW,
        k=k_KNW,
        v=v_KNW,
        out=out_RNW,
        dout=dout_RNW,
        lse=lse_NR,
        softmax_scale=scale,
        causal=call.causal,
        cu_seqlens_q=call.cu_q,
        cu_seqlens_k=call.cu_k,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        deterministic=deterministic(),
    )
    return dq_RNW, dk_KNW, dv_KNW
