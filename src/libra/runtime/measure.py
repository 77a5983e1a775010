"""Measuring this machine for `libra calibrate`: attention kernels and matrix products.

Kernels are called as the executor calls them, with index maps made beforehand and buffers in place.
Each time is the median of repeats after warm-up, with the device idle before and after.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from libra.plan.attention_calls import AttentionCall
from libra.runtime.kernels import kernel_for
from libra.runtime.kernels.interface import Buffers, Grads, Kernel
from libra.runtime.speed import Stopwatch, synchronise

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Numbers of calls before and during a measurement."""

    warm_up: int = 2
    """Most calls before the measurement."""

    least: int = 3
    """Fewest timed calls."""

    most: int = 20
    """Most timed calls, for short ones."""

    seconds: float = 0.2
    """Time after which no further call is made, once one has warmed up and `least` have counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The object of a measurement: a device, its kernel and the dtype of tensors."""

    device: torch.device
    kernel: Kernel
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The device, kernel and dtype in words."""
        place = f"CPU, threads: {torch.get_num_threads()}"
        if self.device.type == "cuda":
            place = torch.cuda.get_device_name(self.device)
        return f"{place}, kernel {self.kernel.name}, {str(self.dtype).removeprefix('torch.')}"


def find_machine(device: str, *, kernel: str | None, dtype: str | None) -> Machine:
    """The machine to measure; by default its best kernel, in bf16 on a GPU and fp32 on a CPU.

    ValueError for a device that is not there, an unknown dtype and a kernel that does not serve.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is usable here; choose device cpu")
    place = torch.device(device)
    chosen = dtype or ("bfloat16" if device == "cuda" else "float32")
    return Machine(device=place, kernel=kernel_for(place, kernel), dtype=getattr(torch, chosen))


def attention_seconds(
    machine: Machine,
    *,
    count: int,
    q_len: int,
    k_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    repeats: Repeats,
) -> tuple[float, float]:
    """Seconds of a call of `count` equal segments, forward and backward.

    Every segment has keys of its own.  Key and value heads have `dim` elements.
    """
    segment, zero = np.arange(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    # Segment i has rows [i * q_len, (i + 1) * q_len) and keys [i * k_len, (i + 1) * k_len).
    queries, keys = (segment * q_len, zero + q_len), (segment * k_len, zero + k_len)
    call = AttentionCall(*queries, *keys, zero, zero, heads, kv_heads)
    device, kernel = machine.device, machine.kernel
    draw = torch.Generator(device=device).manual_seed(0)

    def rows(number: int, width: int) -> torch.Tensor:
        shape = (count * number, width, dim)
        return torch.randn(shape, generator=draw, device=device, dtype=machine.dtype)

    q, k, v = rows(q_len, heads), rows(k_len, kv_heads), rows(k_len, kv_heads)
    # The executor, too, keeps dK and dV in at least fp32.
    sums = torch.promote_types(machine.dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=sums), torch.zeros_like(v, dtype=sums)
    lse = torch.empty(call.lse_size, device=device, dtype=sums)
    buffers = Buffers(q, k, v, torch.empty_like(q), lse)
    grads = Grads(rows(q_len, heads), torch.empty_like(q), dk, dv)
    prepared, scale = kernel.prepare(call, device), dim**-0.5
    return (
        median_seconds(lambda: kernel.forward(prepared, buffers, scale), device, repeats),
        median_seconds(lambda: kernel.backward(prepared, buffers, grads, scale), device, repeats),
    )


def matmul_rate(machine: Machine, size: int, *, repeats: Repeats) -> float:
    """FLOP/s of the product of two square matrices of `size`."""
    a, b = (torch.randn(size, size, device=machine.device, dtype=machine.dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = median_seconds(lambda: torch.mm(a, b, out=out), machine.device, repeats)
    return 2 * size**3 / seconds


def median_seconds(call: Callable[[], object], device: torch.device, repeats: Repeats) -> float:
    """Median of the timed repeats of `call`."""
    watch, times = Stopwatch(), list[float]()

    def seconds() -> float:
        watch.start(device)
        call()
        watch.stop()
        synchronise(device)
        return watch.total()

    # Step 1: warm up, because the first call may compile or choose an algorithm.
    synchronise(device)
    spent = 0.0
    for _ in range(repeats.warm_up):
        if (spent := spent + seconds()) >= repeats.seconds:
            break
    # Step 2: few calls of a slow kernel, many of a quick one.
    while len(times) < repeats.most:
        if len(times) >= repeats.least and sum(times) >= repeats.seconds:
            break
        times.append(seconds())
    return statistics.median(times)
