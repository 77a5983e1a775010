"""The demo's stopwatch around attention calls."""

from __future__ import annotations

import pytest
import torch

from examples.stopwatch import timed
from libra.runtime.speed import Stopwatch


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 10

    def passes(self, seconds: float) -> None:
        self.now += seconds


class SlowSum(torch.autograd.Function):
    """An attention that takes 2 s forward and 3 s backward."""

    @staticmethod
    def forward(ctx, clock, q, k, v):
        ctx.clock = clock
        clock.passes(2)
        return q + k + v

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.passes(3)
        return None, grad, grad, grad


def test_attention_is_timed_forward_and_backward_and_nothing_else() -> None:
    clock = Clock()
    watches = (Stopwatch(clock.perf_counter), Stopwatch(clock.process_time))
    attend = timed(lambda q, k, v: SlowSum.apply(clock, q, k, v), watches)
    x = torch.ones(4, requires_grad=True)
    before = x * 1
    before.register_hook(lambda grad: clock.passes(100))
    after = attend(before * 1, before * 2, before * 3) * 2
    clock.passes(100)
    assert watches[0].total() == 2 and watches[1].total() == pytest.approx(0.2)
    after.register_hook(lambda grad: clock.passes(100))
    after.sum().backward()
    assert watches[0].total() == 3 and watches[1].total() == pytest.approx(0.3)
    assert x.grad.tolist() == [12.0] * 4
