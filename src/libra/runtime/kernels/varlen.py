"""PyTorch's own FlashAttention, the operators beneath `torch.nn.attention.varlen.varlen_attn`.

The operators and not the function, which came in 2.10, takes a scale only since 2.11, and saves
for an autograd that is not used here.  Their schemas kept these arguments from 2.9 to 2.13; the LSE
of packed rows is (heads, rows).  Which FlashAttention answers is PyTorch's choice
(`torch.nn.attention.activate_flash_attention_impl`).  The backward repeats itself under
`torch.use_deterministic_algorithms(True)`.
"""

from __future__ import annotations

import torch

from libra.runtime.kernels.build import PackedKernel
from libra.runtime.kernels.packed import Call

Tensor = torch.Tensor


def kernel() -> PackedKernel:
    """The `Kernel` of PyTorch's variable-length attention.  ImportError if PyTorch lacks it."""
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this PyTorch was built without FlashAttention")
    return PackedKernel(name="varlen", attend=_attend, attend_backward=_attend_backward)


def _attend(
    q_RNW: Tensor, k_KNW: Tensor, v_KNW: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor]:
    out_RNW, lse_NR, *_ = torch.ops.aten._flash_attention_forward(
        query=q_RNW,
        key=k_KNW,
        value=v_KNW,
        cum_seq_q=call.cu_q,
        cum_seq_k=call.cu_k,
        max_q=call.max_q,
        max_k=call.max_k,
        dropout_p=0.0,
        is_causal=call.causal,
        return_debug_mask=False,
        scale=scale,
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
    dq_RNW, dk_KNW, dv_KNW = torch.ops.aten._flash_attention_backward(
        grad_out=dout_RNW,
        query=q_RNW,
        key=k_KNW,
        value=v_KNW,
        out=out_RNW,
        logsumexp=lse_NR,
        cum_seq_q=call.cu_q,
        cum_seq_k=call.cu_k,
        max_q=call.max_q,
        max_k=call.max_k,
        dropout_p=0.0,
        is_causal=call.causal,
        rng_state=torch.zeros(2, dtype=torch.uint64, device=q_RNW.device),
        unused=torch.empty(0, device=q_RNW.device),
        scale=scale,
    )
    return dq_RNW, dk_KNW, dv_KNW
