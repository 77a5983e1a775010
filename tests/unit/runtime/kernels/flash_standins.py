"""Stand-ins for the FlashAttention builds, with their published call semantics, that run on a CPU.

Each takes keywords only, spelt as the library spells them, refuses what the library refuses, and
gives what it gives: packed rows, bottom-right causal masks, LSE as (heads, rows).  The backward
uses the output and LSE it is handed, so a caller that hands it wrong ones gets wrong gradients.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

Tensor = torch.Tensor


def install_flash2(patch: pytest.MonkeyPatch, version: str = "2.8.3") -> None:
    """`flash_attn` as of 2.7 to 2.8."""
    interface = _module(
        "flash_attn.flash_attn_interface",
        _flash_attn_varlen_forward=_flash2_forward,
        _flash_attn_varlen_backward=_flash2_backward,
    )
    package = _module("flash_attn", __version__=version, flash_attn_interface=interface)
    _install(patch, package, interface)


def install_flash3(patch: pytest.MonkeyPatch, *, operator: bool) -> None:
    """`flash_attn_interface` before (False) and since (True) its backward is a custom operator."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        _refuse_dims(q, v, equal=False)
        offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = _forward(q, k, v, *offsets, softmax_scale, causal)
        return (out, lse) if return_attn_probs else out

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        sequed_q: None,
        sequed_k: None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> None:
        _refuse_dims(q, v, equal=False)
        offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        grads = _backward(dout, q, k, v, out, softmax_lse, *offsets, softmax_scale, causal)
        _fill((dq, dk, dv), grads)

    class Operator:
        """Hides its parameters behind keywords, as a custom operator does."""

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["causal"] = kwargs.pop("is_causal", False)
            _keywords_only(backward)(*args, **kwargs)

    module = _module(
        "flash_attn_interface",
        flash_attn_varlen_func=_keywords_only(forward),
        _flash_attn_backward=Operator() if operator else _keywords_only(backward),
    )
    _install(patch, module)


def install_flash4(patch: pytest.MonkeyPatch) -> None:
    """`flash_attn.cute` without `flash_attn` itself: the package is then a namespace."""
    interface = _module(
        "flash_attn.cute.interface",
        flash_attn_varlen_func=_flash4_forward,
        _flash_attn_bwd=_flash4_backward,
    )
    cute = _module("flash_attn.cute", interface=interface)
    _install(patch, _module("flash_attn", cute=cute), cute, interface)


@contextlib.contextmanager
def varlen_operators(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's own operators on the CPU; their real schemas check names and types of arguments."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        assert dropout_p == 0.0 and not return_debug_mask
        _refuse_dims(query, value, equal=True)
        offsets = (cum_seq_q, cum_seq_k, max_q, max_k)
        out, lse = _forward(query, key, value, *offsets, scale, is_causal)
        nothing = query.new_empty(0)
        return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing.clone()

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert dropout_p == 0.0 and rng_state.shape == (2,) and rng_state.dtype == torch.uint64
        _refuse_dims(query, value, equal=True)
        offsets = (cum_seq_q, cum_seq_k, max_q, max_k)
        grads = _backward(grad_out, query, key, value, out, logsumexp, *offsets, scale, is_causal)
        return tuple(
            grad.to(like.dtype) for grad, like in zip(grads, (query, key, value), strict=True)
        )

    patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield
    finally:
        library._destroy()


def _keywords_only(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            raise TypeError("argument order differs between versions: call with keywords")
        return function(**kwargs)

    call.__wrapped__ = function  # type: ignore[attr-defined]  # so that its signature shows
    return call


@_keywords_only
def _flash2_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:
    assert dropout_p == 0.0 and window_size_left == window_size_right == -1
    _refuse_dims(q, v, equal=True)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _forward(q, k, v, *offsets, softmax_scale, causal)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@_keywords_only
def _flash2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    assert dropout_p == 0.0 and softcap == 0.0 and alibi_slopes is None
    assert window_size_left == window_size_right == -1
    assert rng_state is not None, "the backward kernel reads it without dropout too"
    assert dq is not None and dk is not None and dv is not None, "gradients go nowhere"
    _refuse_dims(q, v, equal=True)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    grads = _backward(dout, q, k, v, out, softmax_lse, *offsets, softmax_scale, causal)
    _fill((dq, dk, dv), grads)
    return torch.empty(0)


@_keywords_only
def _flash4_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    assert max_seqlen_q is not None and max_seqlen_k is not None
    _refuse_dims(q, v, equal=False)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _forward(q, k, v, *offsets, softmax_scale, causal)
    return out, lse if return_lse else None


@_keywords_only
def _flash4_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    assert max_seqlen_q is not None and max_seqlen_k is not None
    _refuse_dims(q, v, equal=False)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    grads = _backward(dout, q, k, v, out, lse, *offsets, softmax_scale, causal)
    return tuple(grad.to(like.dtype) for grad, like in zip(grads, (q, k, v), strict=True))


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


def _install(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        patch.delitem(sys.modules, name)
    for module in modules:
        patch.setitem(sys.modules, module.__name__, module)


def _refuse_dims(q: Tensor, v: Tensor, *, equal: bool) -> None:
    dims = (q.shape[2], v.shape[2])
    assert max(dims) <= 256 and not any(dim % 8 for dim in dims), dims
    assert dims[0] == dims[1] or (not equal and dims == (192, 128)), dims


def _segments(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> list[tuple[slice, slice]]:
    assert q.dtype in (torch.float16, torch.bfloat16), q.dtype
    for offsets, total, longest in ((cu_q, len(q), max_q), (cu_k, len(k), max_k)):
        assert offsets.dtype == torch.int32 and offsets.is_contiguous()
        assert offsets[0] == 0 and offsets[-1] == total and (offsets.diff() > 0).all()
        assert type(longest) is int and longest == int(offsets.diff().max())
    assert len(cu_q) == len(cu_k)
    spans = (list(map(slice, cu[:-1].tolist(), cu[1:].tolist())) for cu in (cu_q, cu_k))
    return list(zip(*spans, strict=True))


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    position = torch.arange(len(q))[:, None] + (len(k) - len(q))
    return scores.masked_fill(torch.arange(len(k)) > position, -torch.inf) if causal else scores


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """out [rows, heads, value dim] in q's dtype and fp32 LSE [heads, rows]."""
    assert q.dtype == k.dtype == v.dtype and q.stride(2) == k.stride(2) == v.stride(2) == 1
    group = q.shape[1] // k.shape[1]
    out, lse = q.new_empty((*q.shape[:2], v.shape[2])), torch.empty(q.shape[1], len(q))
    for rows, keys in _segments(q, k, cu_q, cu_k, max_q, max_k):
        k_i, v_i = (t[keys].double().repeat_interleave(group, dim=1) for t in (k, v))
        scores = _scores(q[rows].double(), k_i, scale, causal)
        out[rows] = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v_i).to(out.dtype)
        lse[:, rows] = scores.logsumexp(-1).float()
    return out, lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """fp64 gradients by the published formula, from the given output and LSE."""
    assert all(t.dtype == q.dtype and t.stride(2) == 1 for t in (dout, k, v, out))
    assert lse.dtype == torch.float32 and lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()
    heads, kv_heads = q.shape[1], k.shape[1]
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64) for t in (q, k, v))
    for rows, keys in _segments(q, k, cu_q, cu_k, max_q, max_k):
        q_i, dout_i, out_i = (t[rows].double() for t in (q, dout, out))
        k_i, v_i = (t[keys].double().repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        weights = (_scores(q_i, k_i, scale, causal) - lse[:, rows, None].double()).exp()
        delta = (dout_i * out_i).sum(-1).T[..., None]
        dscores = weights * (torch.einsum("qhe,khe->hqk", dout_i, v_i) - delta) * factor
        dq[rows] = torch.einsum("hqk,khd->qhd", dscores, k_i)
        dk_i = torch.einsum("hqk,qhd->khd", dscores, q_i)
        dv_i = torch.einsum("hqk,qhe->khe", weights, dout_i)
        dk[keys] = dk_i.unflatten(1, (kv_heads, -1)).sum(2)
        dv[keys] = dv_i.unflatten(1, (kv_heads, -1)).sum(2)
    return dq, dk, dv


def _fill(targets: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        assert target.shape == value.shape
        target.copy_(value)
