"""What a layer costs beside its kernel, by the number of segments, and where that time goes."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import libra
from benchmarks.gpu.stopwatch import Stopwatch, Watched
from libra.runtime.microbatch import Microbatch
from libra.runtime.speed import synchronise

PARTS = ("operator", "agree", "microbatch", "executor", "rows", "wait")
"""Host time outside kernels: autograd and the operator's dispatch; the ranks' agreement; checks and
look-ups; buffers, padding and launching; packing, posting and placing rows; waiting for them."""


def layer_overhead(
    microbatch: Microbatch,
    watched: Watched,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    repeats: int,
) -> dict[str, Any]:
    """Seconds of forward and backward, of their kernel calls alone, and of the parts besides.

    `tensors` are q, k, v and the gradient of the output.  Layer and kernels run in turn.
    """
    q, k, v, dout = tensors
    device = q.device
    times: dict[str, list[float]] = {}

    def step() -> None:
        for leaf in (q, k, v):
            leaf.grad = None
        watched.calls.clear()
        outputs: list[torch.Tensor] = []
        note(
            "forward", lambda: outputs.append(libra.libra_attention(q, k, v, microbatch=microbatch))
        )
        ahead = list(watched.calls)
        watched.calls.clear()
        note("backward", lambda: outputs[0].backward(dout))
        note("bare forward", lambda: run_calls(ahead))
        note("bare backward", lambda: run_calls(watched.calls[:]))

    def note(name: str, call: Callable[[], object]) -> None:
        taken = seconds(call, device)
        times.setdefault(name, []).append(taken)

    step()
    times.clear()
    for _ in range(repeats):
        step()
    found: dict[str, Any] = {name: statistics.median(each) for name, each in times.items()}
    for way in ("forward", "backward"):
        pairs = zip(times[way], times[f"bare {way}"], strict=True)
        found[f"{way} extra"] = statistics.median(ours - bare for ours, bare in pairs)
    found["parts"] = host_parts(microbatch, watched, tensors, repeats)
    found["waits_for_device"] = waits_for_device(step, device)
    return found


def waits_for_device(step: Callable[[], None], device: torch.device) -> list[str]:
    """Where the host waited for the device in a step, as PyTorch tells; on a CPU nowhere."""
    if device.type != "cuda":
        return []
    synchronise(device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(each.filename).name}:{each.lineno}" for each in told]


def host_parts(
    microbatch: Microbatch,
    watched: Watched,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    repeats: int,
) -> dict[str, float]:
    """Host seconds of a forward and backward by part, the kernel among them."""
    q, k, v, dout = tensors
    clock = Stopwatch()
    total = 0.0
    with clock.watching(watched):
        for _ in range(repeats):
            watched.calls.clear()
            total += seconds(
                lambda: libra.libra_attention(q, k, v, microbatch=microbatch).backward(dout),
                q.device,
            )
    own = dict(clock.own)
    parts = {name: own.pop(name, 0.0) for name in ("kernel", *PARTS[1:])}
    parts["operator"] = total - sum(parts.values())
    return {name: taken / repeats for name, taken in parts.items()}


def run_calls(calls: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """Kernel calls again, on the same buffers."""
    for run, call in calls:
        run(*call)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call, the device idle before and after."""
    synchronise(device)
    begun = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - begun


def equal_bounds(tokens: int, samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bounds of `samples` samples of one length; `tokens` is a multiple."""
    return np.arange(samples + 1, dtype=np.int64) * (tokens // samples)
