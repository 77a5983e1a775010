"""The small interface behind which every attention kernel sits; `AttentionCall` says what it is asked
for.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from libra.plan.segments import AttentionCall

__all__ = ["AttentionCall", "Kernel"]


class Kernel(Protocol):
    """Variable-length causal attention on one device.  T rows of a buffer, N heads, D key dim, E
    value dim.
    """

    def prepare(self, segments: AttentionCall, device: torch.device) -> Any:
        """Index maps of a call, made once per plan and passed back to `forward` and `backward`."""

    def forward(
        self,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TNE: torch.Tensor,
        prepared: Any,
        scale: float,
        out_TNE: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write the segments' rows of `out_TNE` (addressed like q) and their flat fp32 (fp64 for
        fp64) `lse`.
        """

    def backward(
        self,
        dout_TNE: torch.Tensor,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TNE: torch.Tensor,
        out_TNE: torch.Tensor,
        lse: torch.Tensor,
        prepared: Any,
        scale: float,
        dq_TND: torch.Tensor,
        dk_TND: torch.Tensor,
        dv_TNE: torch.Tensor,
    ) -> None:
        """Write the segments' rows of `dq_TND`; add to `dk_TND` and `dv_TNE`, accumulators of at
        least fp32.
        """
