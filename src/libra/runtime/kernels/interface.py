"""The interface that every attention kernel implements, and the checks that all kernels share.

Checks run before a kernel touches memory.  They need plain integers only, so no check waits for the
device.

Shape legend: T rows of a buffer, N heads, D key head dim, E value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from libra.plan.attention_calls import AttentionCall


class Buffers(NamedTuple):
    """Tensors that both passes of a kernel use.  One is made for each call, so a named tuple."""

    q: torch.Tensor
    """[T, N, D]"""
    k: torch.Tensor
    """[T, N, D], with the rows and heads of `v`."""
    v: torch.Tensor
    """[T, N, E]"""
    out: torch.Tensor
    """[T, N, E], addressed like `q`.  The forward pass writes it, the backward pass reads it."""
    lse: torch.Tensor
    """Flat log-sum-exp, fp32 (fp64 for fp64), ordered by segment, then head, then row."""


class Grads(NamedTuple):
    """Tensors that only the backward pass uses."""

    dout: torch.Tensor
    """[T, N, E], like `out`."""
    dq: torch.Tensor
    """[T, N, D], like `q`.  Rows are overwritten."""
    dk: torch.Tensor
    """[T, N, D], a sum in at least fp32 to which the kernel adds."""
    dv: torch.Tensor
    """[T, N, E], likewise."""


class Kernel(Protocol):
    """Variable-length causal attention on one device."""

    @property
    def name(self) -> str:
        """The name by which `kernel_for` finds it."""

    def prepare(self, call: AttentionCall, device: torch.device) -> Any:
        """Index maps of a call, made once per plan and given back to `forward` and `backward`."""

    def forward(self, prepared: Any, buffers: Buffers, scale: float) -> None:
        """Write the rows of `buffers.out` and `buffers.lse` that belong to the call's segments."""

    def backward(self, prepared: Any, buffers: Buffers, grads: Grads, scale: float) -> None:
        """Write the segments' rows of `grads.dq`; add to `grads.dk` and `grads.dv`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Rows, heads and LSE elements that the buffers of a call must hold at least."""

    queries: tuple[int, int]
    """(rows, heads) of q and out."""
    keys: tuple[int, int]
    """(rows, heads) of k and v."""
    lse_size: int


Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared(Generic[Part]):
    """What a kernel makes of one attention call, once per plan."""

    parts: tuple[Part, ...]
    """Calls of the library beneath, in the order in which they run."""
    extents: Extents


def check_call(call: AttentionCall) -> Extents:
    """The extents of `call`.

    Raises ValueError if a segment is empty, lacks keys, or splits the query heads of one key head.
    """
    heads, kv_heads = call.heads, call.kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"segments of {heads} query heads over {kv_heads} key/value heads: "
            "kv_heads must be >= 1 and divide heads"
        )
    for name in ("q_start", "k_start", "q_head", "kv_head"):
        _refuse_first(call, name, getattr(call, name) < 0, ">= 0")
    for name in ("q_len", "k_len"):
        _refuse_first(call, name, getattr(call, name) < 1, ">= 1; drop empty segments")
    # Masks are aligned bottom-right: with fewer keys than rows, the first rows would see none.
    if call.causal:
        need = ">= q_len; causal rows need a key of their own"
        _refuse_first(call, "k_len", call.k_len < call.q_len, need)
    return Extents(
        queries=(_most(call.q_start + call.q_len), _most(call.q_head + heads)),
        keys=(_most(call.k_start + call.k_len), _most(call.kv_head + kv_heads)),
        lse_size=call.lse_size,
    )


def check_buffers(extents: Extents, buffers: Buffers, grads: Grads | None = None) -> None:
    """ValueError unless dtypes and dims are as `Buffers` and `Grads` say and all rows and heads of
    `extents` are there.
    """
    q, k, v, out, lse = buffers
    if not q.dtype == k.dtype == v.dtype == out.dtype:
        raise ValueError(
            f"q, k, v, out are {q.dtype}, {k.dtype}, {v.dtype}, {out.dtype}; "
            "attention needs one dtype: cast them alike"
        )
    # The log-sum-exp is kept in fp32 for half precision: backward raises e to it.
    want = torch.promote_types(q.dtype, torch.float32)
    if lse.dtype != want or not lse.is_contiguous() or lse.numel() < extents.lse_size:
        raise ValueError(
            f"lse is {lse.dtype}[{lse.numel()}], contiguous={lse.is_contiguous()}; "
            f"it must be contiguous {want} of at least {extents.lse_size} elements"
        )
    dims = [tensor.shape[2] for tensor in (q, k, v, out)]
    if dims[0] != dims[1] or dims[2] != dims[3] or not all(dims):
        raise ValueError(
            f"head dims of q, k, v, out are {dims}: q must match k, v must match out, and none may "
            "be 0"
        )
    # A larger buffer is fine: segments address rows and heads of a part of it.
    sides = [(extents.queries, {"q": q, "out": out}), (extents.keys, {"k": k, "v": v})]
    if grads is not None:
        _check_grads(buffers, grads)
        sides.append((extents.keys, {"dk": grads.dk, "dv": grads.dv}))
    for (rows, heads), tensors in sides:
        for name, tensor in tensors.items():
            if tensor.shape[0] < rows or tensor.shape[1] < heads:
                raise ValueError(
                    f"{name} holds {tensor.shape[0]} rows x {tensor.shape[1]} heads, "
                    f"but its segments reach {rows} x {heads}: the plan is for another buffer"
                )


def _check_grads(buffers: Buffers, grads: Grads) -> None:
    """ValueError unless dout, dq look like out, q, and dk, dv are sums that lose no precision."""
    for name, like, grad, model in (
        ("dout", "out", grads.dout, buffers.out),
        ("dq", "q", grads.dq, buffers.q),
    ):
        if grad.shape != model.shape or grad.dtype != model.dtype:
            raise ValueError(
                f"{name} is {grad.dtype}{list(grad.shape)}; "
                f"it must be {model.dtype}{list(model.shape)} like {like}"
            )
    least = torch.promote_types(buffers.q.dtype, torch.float32)
    for name, grad in (("dk", grads.dk), ("dv", grads.dv)):
        if torch.promote_types(grad.dtype, least) != grad.dtype:
            raise ValueError(
                f"{name} is {grad.dtype}; "
                f"sums of several segments need an accumulator of at least {least}"
            )


def _refuse_first(call: AttentionCall, name: str, bad: NDArray[np.bool_], need: str) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(f"segment {at} has {name} {getattr(call, name)[at]}; it must be {need}")


def _most(values: NDArray[np.int64]) -> int:
    """The largest value, 0 where there is none."""
    return int(values.max(initial=0))
