"""Step times of every scheme, measured in turn, and each scheme's profile.

Every layer runs forward and backward after a barrier.  A layer's time is its slowest rank's.  Each
rank spends it in kernels (compute), waiting for the slowest (wait), and on all else: moving rows,
copies and kernel launches that no kernel hides (exposed).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.profiler import profile, record_function

from libra.bench.options import BenchOptions
from libra.bench.results import StepTimes
from libra.bench.runner import Ready, SchemeRunner, Step, random_rows
from libra.config import HeadShape
from libra.data.cp_shards import local_positions
from libra.data.packing import Packs
from libra.runtime.consensus import gather
from libra.runtime.speed import TimedKernel, synchronise

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What a rank measures: one layer on windows of a corpus; and what computes it."""

    options: BenchOptions
    windows: Sequence[Packs]
    heads: HeadShape
    dtype: torch.dtype
    device: torch.device
    kernel: TimedKernel
    world: dist.ProcessGroup


def measure_windows(
    job: BenchJob, runners: Sequence[SchemeRunner], done: Callable[[str], None]
) -> dict[str, list[StepTimes]]:
    """Every scheme on every step; the order alternates from step to step.  Collective.

    The result is equal on every rank.  `done` is called with the scheme's key after each step.
    """
    times: dict[str, list[StepTimes]] = {runner.scheme.key: [] for runner in runners}
    turn = 0
    for number, window in enumerate(job.windows):
        plans = [runner.steps(window, job.options.wlb) for runner in runners]
        for index, steps in enumerate(zip(*plans, strict=True)):
            # Alternating, so that no scheme always runs on a machine that has just warmed up.
            for runner, step in list(zip(runners, steps, strict=True))[:: -1 if turn % 2 else 1]:
                ready, run = prepare_step(job, runner, window, step, turn)
                # The first layer makes index maps and does not count.
                clocks = [_timed_layer(job, run) for _ in range(1 + job.options.layers)][1:]
                counts = [ready.load, ready.sent]
                found = _summary(number, index, _gather(job, clocks), _gather(job, counts))
                times[runner.scheme.key].append(found)
                done(runner.scheme.key)
            turn += 1
    return times


def prepare_step(
    job: BenchJob, runner: SchemeRunner, window: Packs, step: Step, seed: int
) -> tuple[Ready, Callable[[], None]]:
    """A planned microbatch, and a call that runs one layer of it on random rows.  Collective."""
    cp = runner.mesh["cp"].size()
    replica, cp_rank = divmod(dist.get_rank(), cp)
    # Packs of one step may differ in tokens (WLB), so rows are counted anew.
    tokens = step.tokens[replica]
    positions = local_positions(tokens, cp, cp_rank, runner.config.shard_layout)
    ready = runner.prepare(step.cu_seqlens(window, replica), tokens, job.heads)
    q, k, v, dout = random_rows(len(positions), job.heads, job.dtype, job.device, seed)

    def run() -> None:
        torch.autograd.grad(ready.attend(q, k, v), (q, k, v), dout)
        synchronise(job.device)

    return ready, run


def write_profile(runs: Mapping[str, Callable[[], None]], device: torch.device, path: Path) -> None:
    """One layer of each scheme under PyTorch's profiler, as a trace of this rank.  Collective.

    Every layer begins behind a barrier, inside a range that has the scheme's label.
    """
    for write in (False, True):  # the first profile of a process is slow
        with profile() as profiler:  # of the CPU, and of a GPU if there is one
            for label, run in runs.items():
                _barrier(device)
                with record_function(label):
                    run()
        if write:
            profiler.export_chrome_trace(str(path))


def _barrier(device: torch.device) -> None:
    """All ranks leave at about the same time, their devices idle."""
    synchronise(device)
    dist.all_reduce(torch.zeros(1))


def _gather(job: BenchJob, mine: ArrayLike) -> FloatArray:
    """Every rank's numbers, [ranks, ...]."""
    return gather(job.world, torch.from_numpy(np.asarray(mine, dtype=np.float64))).numpy()


def _timed_layer(job: BenchJob, run: Callable[[], None]) -> tuple[float, float, float]:
    """(seconds in all, seconds in kernels, CPU seconds) of this rank."""
    job.kernel.watch.total()  # calls before this layer do not count
    _barrier(job.device)
    begin, cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    # `run` has left the device idle, so all kernel times are known.
    return seconds, job.kernel.watch.total(), cpu


def _summary(window: int, step: int, clocks: FloatArray, counts: FloatArray) -> StepTimes:
    """The layer whose straggler is the (lower) median, from clocks [ranks, layers, 3] and counts
    [ranks, 2] of load and bytes sent.
    """
    # Three layers whose slowest ranks take 4, 9 and 5 ms: the layer of 5 ms counts, as a whole, so
    # that its parts add up.
    straggler = clocks[:, :, 0].max(axis=0)
    layer = int(np.argsort(straggler, kind="stable")[(len(straggler) - 1) // 2])
    own, compute, cpu = clocks[:, layer].T
    return StepTimes(
        window=window,
        step=step,
        straggler=float(straggler[layer]),
        compute=float(compute.mean()),
        exposed=float((own - compute).mean()),
        wait=float((straggler[layer] - own).mean()),
        cpu=float(cpu.max()),
        load=int(counts[:, 0].max()),
        sent=int(counts[:, 1].sum()),
    )
