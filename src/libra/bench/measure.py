"""Step times of every scheme, measured in turn, and each scheme's profile.

Every layer runs forward and backward after a barrier.  A layer's time is its slowest rank's.  Each
rank spends it in kernels (compute), waiting for the slowest (wait), and on all else: moving rows,
copies and kernel launches that no kernel hides (exposed).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, record_function

from libra.baselines.wlb import WlbConfig
from libra.bench.results import StepTimes
from libra.bench.runner import Ready, SchemeRunner, random_rows
from libra.bench.steps import Step
from libra.config import HeadShape
from libra.data.cp_shards import local_positions
from libra.data.packing import Packs
from libra.runtime.speed import TimedKernel, synchronise

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRank:
    """This rank, with the device, dtype, heads and kernel that it measures."""

    rank: int
    world: int
    cp: int
    device: torch.device
    dtype: torch.dtype
    heads: HeadShape
    kernel: TimedKernel


def measure_windows(
    windows: Iterable[Packs],
    runners: Sequence[SchemeRunner],
    here: BenchRank,
    *,
    layers: int,
    wlb: WlbConfig,
    done: Callable[[str], None],
) -> dict[str, list[StepTimes]]:
    """Every scheme on every step; the order alternates from step to step.  Collective.

    The result is equal on every rank.  `done` is called with the scheme's key after each step.
    """
    times: dict[str, list[StepTimes]] = {runner.scheme.key: [] for runner in runners}
    turn = 0
    for number, window in enumerate(windows):
        plans = {runner.scheme.key: runner.steps(window, wlb) for runner in runners}
        for index in range(len(plans[runners[0].scheme.key])):
            # Alternating, so that no scheme always runs on a machine that has just warmed up.
            for runner in runners[:: -1 if turn % 2 else 1]:
                key = runner.scheme.key
                ready, run = prepare_step(runner, window, plans[key][index], here, turn)
                # The first layer makes index maps and does not count.
                clocks = np.stack([_timed_layer(run, here) for _ in range(1 + layers)])[1:]
                every = _gather(np.append(clocks.ravel(), [ready.load, ready.sent]), here)
                times[key].append(_summary(number, index, every, layers))
                done(key)
            turn += 1
    return times


def prepare_step(
    runner: SchemeRunner, window: Packs, step: Step, here: BenchRank, seed: int
) -> tuple[Ready, Callable[[], None]]:
    """A planned microbatch, and a call that runs one layer of it on random rows.  Collective."""
    replica, cp_rank = divmod(here.rank, here.cp)
    tokens = step.tokens[replica]
    positions = local_positions(tokens, here.cp, cp_rank, runner.config.shard_layout)
    ready = runner.prepare(step.cu_seqlens(window, replica), tokens, here.heads)
    q, k, v, dout = random_rows(len(positions), here.heads, here.dtype, here.device, seed)

    def run() -> None:
        torch.autograd.grad(ready.attend(q, k, v), (q, k, v), dout)
        synchronise(here.device)

    return ready, run


def write_profile(runs: Mapping[str, Callable[[], None]], here: BenchRank, path: Path) -> None:
    """One layer of each scheme under PyTorch's profiler, as a trace of this rank.  Collective.

    Every layer begins behind a barrier, inside a range that has the scheme's label.
    """
    activities = [ProfilerActivity.CPU]
    if here.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for write in (False, True):  # the first profile of a process is slow
        with profile(activities=activities) as profiler:
            for label, run in runs.items():
                _barrier(here.device)
                with record_function(label):
                    run()
        if write:
            profiler.export_chrome_trace(str(path))


def _barrier(device: torch.device) -> None:
    """All ranks leave at about the same time, their devices idle."""
    synchronise(device)
    dist.all_reduce(torch.zeros(1))


def _gather(mine: FloatArray, here: BenchRank) -> FloatArray:
    """Every rank's numbers, [ranks, ...]."""
    sent = torch.from_numpy(np.asarray(mine, dtype=np.float64))
    every = [torch.empty_like(sent) for _ in range(here.world)]
    dist.all_gather(every, sent)
    return torch.stack(every).numpy()


def _timed_layer(run: Callable[[], None], here: BenchRank) -> FloatArray:
    """(seconds in all, seconds in kernels, CPU seconds) of this rank."""
    here.kernel.watch.total()  # calls before this layer do not count
    _barrier(here.device)
    begin, cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    # `run` has left the device idle, so all kernel times are known.
    return np.array([seconds, here.kernel.watch.total(), cpu])


def _summary(window: int, step: int, every: FloatArray, layers: int) -> StepTimes:
    """The layer whose straggler is the (lower) median, from [ranks, layers * 3 + 2]."""
    clocks = every[:, :-2].reshape(len(every), layers, 3)
    straggler = clocks[:, :, 0].max(axis=0)
    layer = int(np.argsort(straggler, kind="stable")[(layers - 1) // 2])
    own, compute, cpu = clocks[:, layer].T
    return StepTimes(
        window=window,
        step=step,
        straggler=float(straggler[layer]),
        compute=float(compute.mean()),
        exposed=float((own - compute).mean()),
        wait=float((straggler[layer] - own).mean()),
        cpu=float(cpu.max()),
        load=int(every[:, -2].max()),
        sent=int(every[:, -1].sum()),
    )
