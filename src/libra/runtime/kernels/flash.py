"""The FlashAttention builds, in one table: where their functions are and how they spell arguments.

A build is called with packed rows (see `packed`): gather, call, scatter.  Nothing here waits for
the device: lengths are plain integers and index tensors are uploaded once.  All calls use keywords,
because the order of arguments differs between versions.  All builds align causal masks bottom-right
and return the LSE of packed rows as (heads, rows) in fp32.

Shape legend: R packed query rows of a call, K its packed key rows, N heads, D key head dim, E value
head dim, W width of a head as the build takes it, for keys or for values.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels.interface import Buffers, Grads, Prepared, check_buffers
from libra.runtime.kernels.packed import PackedCall, pack

Tensor = torch.Tensor

_WIDEST: Final = 256
"""Largest head dim of every build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One row of the table."""

    forward: str
    """`module:function`."""
    backward: str
    names: Mapping[str, str] = field(default_factory=dict)
    """Keywords that are not spelt as in the `flash_attn` package, by their spelling there."""
    backward_names: Mapping[str, str] = field(default_factory=dict)
    """More of them, for backward alone."""
    forward_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords with the same value in every call."""
    backward_options: Mapping[str, Any] = field(default_factory=dict)
    backward_zeros: Mapping[str, tuple[int, torch.dtype]] = field(default_factory=dict)
    """Tensors that backward wants although it has no use for them: elements and dtype."""
    fills_grads: bool = False
    """Backward writes into dq, dk and dv that it is given; else it returns them."""
    deterministic: bool = True
    """Backward takes `deterministic`; else it asks PyTorch itself."""
    unequal_dims: tuple[tuple[int, int], ...] = ()
    """(key, value) head dims that it takes as they are; others are zero-padded to one width."""
    needs: str = ""
    """A keyword of forward, without which the build is too old to return the LSE."""
    too_old: str = ""
    """The error then."""


BUILDS: Final[Mapping[str, Build]] = {
    # The `flash_attn` package from 2.7, for Ampere GPUs and newer.  Signatures read in releases
    # 2.7.0 to 2.8.4; window sizes are two arguments since 2.7.  Backward reads `rng_state` even
    # without dropout.
    "flash2": Build(
        forward="flash_attn.flash_attn_interface:_flash_attn_varlen_forward",
        backward="flash_attn.flash_attn_interface:_flash_attn_varlen_backward",
        forward_options={"dropout_p": 0.0},
        backward_options={
            "dropout_p": 0.0,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
        },
        backward_zeros={"rng_state": (2, torch.int64)},
        fills_grads=True,
    ),
    # The `flash_attn_interface` module, for Hopper GPUs.  Signatures read at each change between
    # August 2025, when `return_attn_probs` came back, and August 2026.  `sequed_q` and `sequed_k`
    # are spelt so in all of them.
    "flash3": Build(
        forward="flash_attn_interface:flash_attn_varlen_func",
        backward="flash_attn_interface:_flash_attn_backward",
        forward_options={"return_attn_probs": True},
        backward_options={"sequed_q": None, "sequed_k": None},
        fills_grads=True,
        unequal_dims=((192, 128),),
        needs="return_attn_probs",
        too_old="flash_attn_interface cannot return the LSE; one from September 2025 or later can",
    ),
    # The `flash-attn-4` package, for Hopper and Blackwell GPUs.  Signatures read in releases 4.0.0
    # beta 0 to beta 27.  Backward repeats itself on request, except on consumer Blackwell and
    # before beta 5 on Hopper.
    "flash4": Build(
        forward="flash_attn.cute.interface:flash_attn_varlen_func",
        backward="flash_attn.cute.interface:_flash_attn_bwd",
        names={"softmax_lse": "lse"},
        forward_options={"return_lse": True},
        unequal_dims=((192, 128),),
        needs="return_lse",
        too_old="flash_attn.cute cannot return the LSE; 4.0.0 beta 0 or later can",
    ),
    # PyTorch's own FlashAttention: the operators beneath `torch.nn.attention.varlen.varlen_attn`.
    # That function came in 2.10, takes a scale only since 2.11 and saves tensors for an autograd
    # that is not used here.  The operators kept these arguments from 2.9 to 2.13.  PyTorch chooses
    # the FlashAttention (`torch.nn.attention.activate_flash_attention_impl`).
    "varlen": Build(
        forward="torch:ops.aten._flash_attention_forward",
        backward="torch:ops.aten._flash_attention_backward",
        names={
            "q": "query",
            "k": "key",
            "v": "value",
            "dout": "grad_out",
            "softmax_lse": "logsumexp",
            "cu_seqlens_q": "cum_seq_q",
            "cu_seqlens_k": "cum_seq_k",
            "max_seqlen_q": "max_q",
            "max_seqlen_k": "max_k",
            "softmax_scale": "scale",
            "causal": "is_causal",
        },
        forward_options={"dropout_p": 0.0, "return_debug_mask": False},
        backward_options={"dropout_p": 0.0},
        backward_zeros={"rng_state": (2, torch.uint64), "unused": (0, torch.float32)},
        deterministic=False,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashKernel:
    """The `Kernel` of a FlashAttention build: bf16 and fp16, head dims to 256."""

    name: str
    build: Build
    attend: Callable[..., Any]
    attend_backward: Callable[..., Any]
    duplication: int = 4
    """About how many copies of the keys a call may gather.  Fewer: less memory, smaller calls."""

    def prepare(self, call: AttentionCall, device: torch.device) -> Prepared[PackedCall]:
        """Packed calls.  Raises ValueError for segments that no causal kernel could take."""
        return pack(call, device, self.duplication)

    @torch.no_grad()
    def forward(self, prepared: Prepared[PackedCall], buffers: Buffers, scale: float) -> None:
        """Write the segments' rows of `out` and their flat `lse`.

        Raises ValueError for buffers, dtypes and head dims that the build cannot take.
        """
        check_buffers(prepared.extents, buffers)
        for call in prepared.parts:
            arguments = {**self._arguments(call, buffers, scale), **self.build.forward_options}
            out_RNW, lse_NR, *_ = self.attend(**_spell(arguments, self.build.names))
            if lse_NR.shape != (call.q.heads, call.q.count):
                raise RuntimeError(
                    f"{self.name} returned an LSE of {tuple(lse_NR.shape)}, not (heads, rows) "
                    f"= {(call.q.heads, call.q.count)}: this version of it is not supported"
                )
            call.q.scatter(buffers.out, out_RNW[..., : buffers.v.shape[2]])
            buffers.lse.index_copy_(0, call.lse_index, lse_NR.flatten())

    @torch.no_grad()
    def backward(
        self, prepared: Prepared[PackedCall], buffers: Buffers, grads: Grads, scale: float
    ) -> None:
        """Write the segments' rows of `dq`; add to `dk` and `dv`, one key set after the other."""
        check_buffers(prepared.extents, buffers, grads)
        key_dim, value_dim = buffers.q.shape[2], buffers.v.shape[2]
        for call in prepared.parts:
            dq_RNW, dk_KNW, dv_KNW = self._backward_call(call, buffers, grads.dout, scale)
            # Rows of Q occur once in a call; keys may be copied, so their sums go set by set.
            call.q.scatter(grads.dq, dq_RNW[..., :key_dim])
            sizes = [rows.count for rows in call.k_sets]
            for rows, dk, dv in zip(
                call.k_sets, dk_KNW.split(sizes), dv_KNW.split(sizes), strict=True
            ):
                rows.scatter_add(grads.dk, dk[..., :key_dim])
                rows.scatter_add(grads.dv, dv[..., :value_dim])

    def _backward_call(
        self, call: PackedCall, buffers: Buffers, dout_TNE: Tensor, scale: float
    ) -> Iterable[Tensor]:
        """dQ, dK and dV of the packed rows, as wide as the build computes them."""
        build, (_, value_width) = self.build, self.widths(buffers)
        arguments = self._arguments(call, buffers, scale) | {
            "dout": _widen(call.q.gather(dout_TNE), value_width),
            "out": _widen(call.q.gather(buffers.out), value_width),
            "softmax_lse": buffers.lse.index_select(0, call.lse_index).view(call.q.heads, -1),
            **build.backward_options,
        }
        for name, (elements, dtype) in build.backward_zeros.items():
            arguments[name] = torch.zeros(elements, dtype=dtype, device=dout_TNE.device)
        if build.deterministic:
            arguments["deterministic"] = _wants_deterministic()
        # A build that fills gradients gets them as wide as the packed rows.
        packed = {f"d{name}": arguments[name] for name in ("q", "k", "v")}
        filled = {name: t.new_empty(t.shape) for name, t in packed.items() if build.fills_grads}
        names = {**build.names, **build.backward_names}
        returned: Iterable[Tensor] = self.attend_backward(**_spell(arguments | filled, names))
        return filled.values() if build.fills_grads else returned

    def _arguments(self, call: PackedCall, buffers: Buffers, scale: float) -> dict[str, Any]:
        """Keywords that both passes share: packed q, k and v, lengths, scale and mask."""
        key_width, value_width = self.widths(buffers)
        return {
            "q": _widen(call.q.gather(buffers.q), key_width),
            "k": _widen(call.k.gather(buffers.k), key_width),
            "v": _widen(call.k.gather(buffers.v), value_width),
            "cu_seqlens_q": call.cu_q,
            "cu_seqlens_k": call.cu_k,
            "max_seqlen_q": call.max_q,
            "max_seqlen_k": call.max_k,
            "softmax_scale": scale,
            "causal": call.causal,
        }

    def widths(self, buffers: Buffers) -> tuple[int, int]:
        """Widths of key and value heads with their padding.

        Raises ValueError for a dtype that the build does not compute, and for heads too wide.
        """
        if buffers.q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{self.name} computes bf16 and fp16, not {buffers.q.dtype}: cast q, k and v"
            )
        dims = (buffers.q.shape[2], buffers.v.shape[2])
        if dims in self.build.unequal_dims:
            return dims
        width = -(-max(dims) // 8) * 8
        if width > _WIDEST:
            raise ValueError(
                f"head dims {dims[0]} (key) and {dims[1]} (value) need a kernel {width} wide; "
                f"{self.name} ends at {_WIDEST}"
            )
        return width, width


def load(name: str) -> FlashKernel:
    """The kernel of a build.  ImportError if its library is absent or too old."""
    build = BUILDS[name]
    if name == "varlen" and not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this PyTorch was built without FlashAttention")
    if name == "flash2":
        version = pkgutil.resolve_name("flash_attn:__version__")
        if tuple(int(part) for part in version.split(".")[:2]) < (2, 7):
            raise ImportError(f"flash_attn is {version}; 2.7 or later is needed")
    attend = pkgutil.resolve_name(build.forward)
    attend_backward = pkgutil.resolve_name(build.backward)
    if build.needs and build.needs not in inspect.signature(attend).parameters:
        raise ImportError(build.too_old)
    if name == "flash3" and "causal" not in inspect.signature(attend_backward).parameters:
        # In November 2025 backward became a custom operator and its `causal` `is_causal`.
        build = replace(build, backward_names={"causal": "is_causal"})
    return FlashKernel(name=name, build=build, attend=attend, attend_backward=attend_backward)


def _spell(arguments: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Keywords as a build spells them."""
    return {names.get(name, name): value for name, value in arguments.items()}


def _wants_deterministic() -> bool:
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
