"""The stopwatch, the kernel that it times, and the average of a worker's speed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from libra.runtime.kernels.cpu import CpuKernel
from libra.runtime.kernels.interface import Buffers, Grads
from libra.runtime.speed import SpeedMeter, Stopwatch, TimedKernel, relative_speeds
from tests.unit.runtime.kernels.kernel_cases import CPU, SCALE, inputs, plain_case


def test_relative_speeds_wait_for_every_worker_and_ignore_noise() -> None:
    assert relative_speeds(np.array([100, 0])) is None
    assert relative_speeds(np.array([1000, 1004])).tolist() == [1.0, 1.0]
    assert relative_speeds(np.array([50, 150])).tolist() == [0.5, 1.5]
    assert (relative_speeds(np.array([1, 10**9])) > 0).all()


def test_the_meter_follows_the_last_hundred_calls() -> None:
    meter = SpeedMeter()
    assert meter.reading == 0
    for _ in range(10):
        meter.add(pairs=1_000_000, seconds=0.01)
    assert meter.reading == 100_000
    for _ in range(500):
        meter.add(pairs=1_000_000, seconds=0.02)
    assert meter.reading == pytest.approx(50_000, rel=0.02)


def test_a_stopwatch_gives_each_call_once_with_its_pairs() -> None:
    clock = iter([0.0, 2.0, 10.0, 13.0])
    watch = Stopwatch(lambda: next(clock))
    for pairs in (5, 7):
        watch.start(CPU)
        watch.stop(pairs)
    assert list(watch.finished()) == [(5, 2.0), (7, 3.0)]
    assert watch.total() == 0


@pytest.mark.parametrize("backward, calls", [(True, 2), (False, 1)])
def test_a_timed_kernel_computes_as_the_kernel_and_counts_pairs_times_heads(
    backward: bool, calls: int
) -> None:
    case = plain_case([4, 2], heads=2, kv_heads=1, dim=8)
    q, k, v, dout = inputs(case, torch.float64)
    watch = Stopwatch()
    found = {}
    for kernel in (CpuKernel(), TimedKernel(CpuKernel(), watch, backward=backward)):
        prepared = kernel.prepare(case.segments, CPU)
        buffers = Buffers(q, k, v, torch.empty_like(dout), torch.empty(12, dtype=torch.float64))
        grads = Grads(dout, torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v))
        kernel.forward(prepared, buffers, SCALE)
        kernel.backward(prepared, buffers, grads, SCALE)
        found[type(kernel)] = (buffers.out, *grads[1:])
    for plain, timed in zip(*found.values(), strict=True):
        assert torch.equal(plain, timed)
    assert [pairs for pairs, _ in watch.finished()] == [(10 + 3) * 2] * calls
