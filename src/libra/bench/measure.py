"""Running contestants in turn, step by step, and what each rank's clock says.

Every layer runs forward and backward behind a barrier.  A layer's time is its slowest rank's; each
rank spends it in kernels (compute), waiting for the slowest (wait), and on all else: moving rows,
copies and launches that no kernel hides (exposed).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from libra.baselines.wlb import WlbConfig
from libra.bench.contestants import Ready, SchemeRunner, random_rows
from libra.bench.schemes import Scheme, Step, window_steps
from libra.config import HeadShape
from libra.data.cp_shards import local_positions
from libra.data.packing import Packs
from libra.runtime.speed import TimedKernel, synchronise

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank, and what it computes with."""

    rank: int
    world: int
    cp: int
    device: torch.device
    dtype: torch.dtype
    heads: HeadShape
    kernel: TimedKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step of one scheme: its layer of median straggler time; seconds are means over ranks."""

    window: int
    step: int
    straggler: float
    """Slowest rank, forward and backward."""
    compute: float
    exposed: float
    wait: float
    cpu: float
    """CPU seconds of the busiest rank's process, network threads included: no wait counts, nor what
    others do to a busy machine.
    """
    load: int
    """Busiest rank's causal pairs times heads."""
    sent: int
    """Bytes that all ranks send in forward."""


def measure_windows(
    windows: Iterable[Packs],
    contestants: Sequence[SchemeRunner],
    place: Place,
    *,
    layers: int,
    wlb: WlbConfig,
    done: Callable[[str], None],
) -> dict[Scheme, list[StepTimes]]:
    """Every contestant on every step; the order alternates from step to step.  Collective.

    The same on every rank.  `done` hears of each step.
    """
    times: dict[Scheme, list[StepTimes]] = {each.scheme: [] for each in contestants}
    turn = 0
    for number, window in enumerate(windows):
        plans = {each.scheme: plan_steps(each, window, place, wlb) for each in contestants}
        for index in range(len(plans[contestants[0].scheme])):
            for each in contestants[:: -1 if turn % 2 else 1]:
                ready, run = prepare_step(each, window, plans[each.scheme][index], place, turn)
                clocks = np.stack([_timed_layer(run, place) for _ in range(1 + layers)])[1:]
                every = gather(np.append(clocks.ravel(), [ready.load, ready.sent]), place)
                times[each.scheme].append(_summary(number, index, every, layers))
                done(each.scheme)
            turn += 1
    return times


def plan_steps(contestant: SchemeRunner, window: Packs, place: Place, wlb: WlbConfig) -> list[Step]:
    """The steps that a contestant makes of a window."""
    return window_steps(
        window,
        contestant.scheme,
        dp_size=place.world // place.cp,
        pool_size=contestant.pool_size,
        wlb=wlb,
    )


def prepare_step(
    contestant: SchemeRunner, window: Packs, step: Step, place: Place, seed: int
) -> tuple[Ready, Callable[[], None]]:
    """A planned microbatch, and a call that runs one layer of it on random rows.  Collective."""
    replica, cp_rank = divmod(place.rank, place.cp)
    tokens = step.tokens[replica]
    positions = local_positions(tokens, place.cp, cp_rank, contestant.shard_layout)
    ready = contestant.prepare(step.cu_seqlens(window, replica), tokens, place.heads)
    q, k, v, dout = random_rows(len(positions), place.heads, place.dtype, place.device, seed)

    def run() -> None:
        torch.autograd.grad(ready.attend(q, k, v), (q, k, v), dout)
        synchronise(place.device)

    return ready, run


def barrier(device: torch.device) -> None:
    """All ranks leave at about the same time, their devices idle."""
    synchronise(device)
    dist.all_reduce(torch.zeros(1))


def gather(mine: FloatArray, place: Place) -> FloatArray:
    """Every rank's numbers, [ranks, ...]."""
    sent = torch.from_numpy(np.asarray(mine, dtype=np.float64))
    every = [torch.empty_like(sent) for _ in range(place.world)]
    dist.all_gather(every, sent)
    return torch.stack(every).numpy()


def _timed_layer(run: Callable[[], None], place: Place) -> FloatArray:
    """(seconds in all, seconds in kernels, CPU seconds) of this rank."""
    place.kernel.watch.total()
    barrier(place.device)
    begin, cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return np.array([seconds, place.kernel.watch.total(), cpu])


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
