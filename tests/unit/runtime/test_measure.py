"""Measurements of this machine: kernels and matrix products, repeated as often as asked."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from libra.runtime import measure
from libra.runtime.measure import Repeats, attention_seconds, find_machine, matmul_rate


def test_the_cpu_is_really_timed() -> None:
    machine = find_machine("cpu", kernel=None, dtype=None)
    assert machine.dtype == torch.float32 and machine.device.type == "cpu"
    few = Repeats(warm_up=1, least=2, most=2)
    shape = {"q_len": 64, "k_len": 128, "heads": 4, "kv_heads": 2, "dim": 16}
    one = attention_seconds(machine, count=1, **shape, repeats=few)
    many = attention_seconds(machine, count=64, **shape, repeats=few)
    assert many[0] > 4 * one[0] > 0 and many[1] > 4 * one[1] > 0
    assert matmul_rate(machine, 128, repeats=few) > 1e7


def test_repeats_stop_at_the_most_or_when_their_time_is_up(monkeypatch) -> None:
    clock = iter(np.arange(0, 1000, 0.5))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    calls: list[int] = []
    repeats = Repeats(warm_up=2, least=3, most=20, seconds=0.5)
    seconds = measure.median_seconds(lambda: calls.append(1), torch.device("cpu"), repeats)
    assert seconds == 0.5 and len(calls) == 1 + 3  # the first warm-up took all of the time
    calls.clear()
    measure.median_seconds(
        lambda: calls.append(1), torch.device("cpu"), Repeats(warm_up=0, most=4, seconds=1e9)
    )
    assert len(calls) == 4


def test_a_device_that_is_not_there_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is usable here"):
        find_machine("cuda", kernel=None, dtype=None)
    with pytest.raises(ValueError, match="choose cpu or cuda"):
        find_machine("tpu", kernel=None, dtype=None)
