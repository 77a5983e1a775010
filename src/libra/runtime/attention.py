"""`libra_attention`: balanced causal attention of a packed microbatch, one call a layer.

The operator is functional (`libra::attention`, with a fake kernel and registered autograd), so that
selective checkpointing can name it and `torch.compile` sees through it.  Every rank saves the same
tensors, all after its last collective.  Legend: T rows on this rank, N heads, D key dim, E value
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from libra.runtime.executor import Saved
from libra.runtime.microbatch import INNERMOST, Microbatch, find_microbatch


def libra_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    microbatch: Microbatch | None = None,
) -> Tensor:
    """Causal attention inside each sample of the pack, on whichever rank it is computed.

        rank 0 holds |aaaaaaaaaaaaaaaaaaaaaaaa|    one long sample: 24 * 25 / 2 = 300 pairs
        rank 1 holds |bbbccccccddddeeeefffgggg|    short samples: 67 pairs
                           after placement: 184 and 183; rank 1 computes the tail of a and returns
                           its output to rank 0

    Arguments:
        q: [tokens on this rank, query heads, head dim], bf16, fp16, fp32 or fp64.
        k: [tokens on this rank, key/value heads, head dim]; key/value heads divide query heads.
        v: [tokens on this rank, key/value heads, value dim]; value dim may differ from head dim.
        causal: must be True; block-diagonal causal attention is what Libra balances.
        scale: softmax scale; None is 1 / sqrt(head dim).
        microbatch: the microbatch; None takes the innermost `with pool.microbatch(...)`.  A
            checkpoint that runs the forward again takes the innermost then, so pass it where
            backwards do not follow their forwards.

    Returns [tokens on this rank, query heads, value dim], equal to attention on a single device up
    to floating-point order.  Collective over the pool: every rank calls it the same number of
    times, with or without work.  Raises ValueError on every rank for inputs that do not fit,
    RuntimeError outside a microbatch.
    """
    # Step 1: what the operator cannot be asked for is refused on all ranks.
    serial = microbatch.serial if isinstance(microbatch, Microbatch) else INNERMOST
    problem = _find_problem(q, k, v, causal, microbatch)
    if problem is not None:
        find_microbatch(serial).refuse(problem)
    # Step 2: cast as PyTorch's own attention does under autocast.
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = _autocast(q, dtype), _autocast(k, dtype), _autocast(v, dtype)
    # Step 3: call the operator; its other results serve its backward.
    save_for_backward = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    out, *_ = torch.ops.libra.attention(q, k, v, serial, _scale(q, scale), save_for_backward)
    return out  # type: ignore[no-any-return]


def _find_problem(q: object, k: object, v: object, causal: bool, microbatch: object) -> str | None:
    """Problems that would keep this rank from reaching the operator, which checks all others."""
    if microbatch is not None and not isinstance(microbatch, Microbatch):
        return f"microbatch is {microbatch!r}; pass what SequencePool.microbatch returns, or None"
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        kinds = ", ".join(type(tensor).__name__ for tensor in (q, k, v))
        return f"q, k and v must be torch tensors; got {kinds}"
    if not causal:
        return (
            "causal=False: Libra balances causal attention only; use another kernel for this layer"
        )
    if "meta" in (q.device.type, k.device.type, v.device.type):
        return (
            "q, k and v must be on one device and hold data; got "
            f"q on {q.device}, k on {k.device}, v on {v.device}"
        )
    return None


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast that autocast makes for scaled_dot_product_attention: fp64 stays."""
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor


def _scale(q: Tensor, scale: float | None) -> float:
    if scale is not None:
        return float(scale)
    return q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0  # the operator refuses the rest


@torch.library.custom_op("libra::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, serial: int, scale: float, save_for_backward: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    microbatch = find_microbatch(serial)
    saved = microbatch.attend(q, k, v, scale, save_for_backward)
    return saved.out_TNE, saved.lse, saved.peer_out, saved.fetched, _stamp(microbatch)


def _stamp(microbatch: Microbatch) -> Tensor:
    """The microbatch's serial and the number of the call, int64.  The length, too, depends on the
    serial.

    Non-reentrant checkpointing compares the shapes of saved tensors, so a recomputation under
    another microbatch raises CheckpointError on every rank instead of giving wrong gradients.
    """
    stamp = torch.full((2 + microbatch.serial % 251,), microbatch.serial)
    stamp[1] = microbatch.calls
    return stamp


@_attention.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    # Sizes of what is saved depend on the plan, which a compiler does not know.
    context = torch.library.get_ctx()
    return (
        q.new_empty((q.shape[0], q.shape[1], v.shape[2])),
        q.new_empty(context.new_dynamic_size(), dtype=torch.promote_types(q.dtype, torch.float32)),
        q.new_empty(context.new_dynamic_size()),
        q.new_empty(context.new_dynamic_size()),
        torch.empty(context.new_dynamic_size(), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("libra::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, saved: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, stamp = saved
    serial, call, *_ = stamp.tolist()
    return find_microbatch(serial).attend_backward(call, dout, Saved(*tensors), scale)


@_attention_backward.register_fake
def _attention_backward_fake(
    dout: Tensor, saved: Sequence[Tensor], scale: float
) -> tuple[Tensor, ...]:
    like = torch.contiguous_format
    return tuple(torch.empty_like(tensor, memory_format=like) for tensor in saved[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if dout is None:  # unused here, but not on the other ranks: take part
        dout = torch.zeros_like(saved[3])
    dq, dk, dv = torch.ops.libra.attention_backward(dout, saved, ctx.scale)
    return dq, dk, dv, None, None, None


_attention.register_autograd(_backward, setup_context=_save)
