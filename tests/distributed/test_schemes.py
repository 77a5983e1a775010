"""Every scheme of `libra bench` gives a window's samples the same outputs and gradients."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

import libra
from libra.baselines.wlb import WlbConfig
from libra.bench.measure import BenchJob, measure_windows
from libra.bench.options import BenchOptions
from libra.bench.runner import SchemeRunner, make_runners
from libra.config import HeadShape
from libra.runtime.kernels import kernel_for
from libra.runtime.speed import Stopwatch, TimedKernel
from libra.simulate.schemes import MEASURED, SCHEMES
from tests.distributed.cases import make_mesh
from tests.distributed.ranks import RankPool
from tests.reference import block_diagonal_attention

CPU = torch.device("cpu")
HEADS = HeadShape(4, 2, 8, 8)
CONFIG = libra.PoolConfig(pool_size=2, block_size=8, chunks=2)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A window and the heads to run it with."""

    lengths: list[int]
    tokens: int
    cp: int
    heads: HeadShape = HEADS

    @property
    def window(self) -> libra.Packs:
        """Packs with padding, all of one window."""
        return libra.pack_best_fit(self.lengths, self.tokens)


@functools.cache
def every_runner(world_size: int, cp: int) -> tuple[tuple[SchemeRunner, ...], TimedKernel]:
    """Made once, since process groups are."""
    kernel = TimedKernel(kernel_for(CPU), Stopwatch())
    schemes = [SCHEMES[key] for key in MEASURED]
    return make_runners(schemes, make_mesh(world_size, cp), CONFIG, kernel), kernel


def whole_window(job: Job) -> list[torch.Tensor]:
    """q, k, v and dout of every token of the window, fragment by fragment."""
    draw = torch.Generator().manual_seed(1)
    tokens, heads = int(job.window.lengths.sum()), job.heads
    return [
        torch.randn(tokens, count, dim, generator=draw, dtype=torch.float64)
        for count, dim in (
            (heads.q, heads.dim),
            (heads.kv, heads.dim),
            (heads.kv, heads.value_dim),
            (heads.q, heads.value_dim),
        )
    ]


def run_window(each: SchemeRunner, job: Job, rank: int) -> list[torch.Tensor]:
    """out, dq, dk and dv of every token of the window, summed over all ranks' steps."""
    window, (replica, cp_rank) = job.window, divmod(rank, job.cp)
    steps = each.steps(window, WlbConfig(most_tokens=2.0))
    tensors = whole_window(job)
    found = [torch.zeros_like(tensors[i]) for i in (3, 0, 1, 2)]
    starts = np.append(0, np.cumsum(window.lengths))
    for step in steps:
        order = [np.arange(starts[f], starts[f + 1]) for f in step.fragments[replica]]
        token = np.concatenate([*order, np.full(step.tokens[replica], -1)])[: step.tokens[replica]]
        rows = libra.local_positions(
            step.tokens[replica], job.cp, cp_rank, each.config.shard_layout
        )
        mine = torch.from_numpy(token[rows])
        *qkv, dout = (tensor[mine] for tensor in tensors)  # padding holds some token's values
        qkv = [tensor.requires_grad_() for tensor in qkv]
        ready = each.prepare(step.cu_seqlens(window, replica), step.tokens[replica], job.heads)
        out = ready.attend(*qkv)
        real = mine >= 0
        results = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
        for whole, part in zip(found, results, strict=True):
            whole.index_add_(0, mine[real], part[real])
            assert not part[~real].any(), "padding takes part"
    for whole in found:
        dist.all_reduce(whole)
    return found


def equality_case(rank: int, world_size: int, job: Job) -> dict[str, float]:
    """Each scheme's largest difference from the reference."""
    q, k, v, dout = whole_window(job)
    qkv = [tensor.requires_grad_() for tensor in (q, k, v)]
    bounds = [0, *np.cumsum(job.window.lengths).tolist()]
    wanted = block_diagonal_attention(*qkv, bounds)
    due = [wanted.detach(), *torch.autograd.grad(wanted, qkv, dout)]
    errors = {}
    for each in every_runner(world_size, job.cp)[0]:
        found = run_window(each, job, rank)
        errors[each.scheme.key] = max(
            float((a - b).abs().max()) for a, b in zip(found, due, strict=True)
        )
    return errors


JOBS = {
    2: [Job(lengths=[40, 5, 9, 3, 30, 2, 1, 7, 20, 20, 16, 3], tokens=40, cp=cp) for cp in (1, 2)],
    4: [
        Job(lengths=[64, 5, 9, 3, 50, 2, 1, 7, 20, 20, 33, 3, 64], tokens=64, cp=cp)
        for cp in (1, 2, 4)
    ],
}


@pytest.mark.parametrize("job", JOBS[2], ids=lambda job: f"cp{job.cp}")
def test_two_ranks_give_equal_outputs_and_gradients(ranks2: RankPool, job: Job) -> None:
    for errors in ranks2.run(equality_case, _whole_batch(job, 2)):
        assert set(errors) == set(MEASURED)
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("job", JOBS[4], ids=lambda job: f"cp{job.cp}")
def test_four_ranks_give_equal_outputs_and_gradients(ranks4: RankPool, job: Job) -> None:
    for errors in ranks4.run(equality_case, _whole_batch(job, 4)):
        assert set(errors) == set(MEASURED)
        assert max(errors.values()) <= 1e-12, errors


def _whole_batch(job: Job, world: int) -> Job:
    """The job with full samples added until its packs divide over the replicas."""
    for more in itertools.count():
        lengths = [*job.lengths, *[job.tokens] * more]
        larger = Job(lengths=lengths, tokens=job.tokens, cp=job.cp)
        packs = len(larger.window)
        if packs % (world // job.cp) == 0:
            return larger
    raise AssertionError


def times_case(rank: int, world_size: int, job: Job) -> dict[str, list[tuple[float, ...]]]:
    """Measured steps of every scheme."""
    runners, kernel = every_runner(world_size, job.cp)
    assert dist.group.WORLD is not None
    measured = BenchJob(
        options=BenchOptions(
            what="attention", lengths="", layers=2, wlb=WlbConfig(most_tokens=2.0)
        ),
        windows=[job.window],
        heads=job.heads,
        dtype=torch.float64,
        device=CPU,
        kernel=kernel,
        world=dist.group.WORLD,
    )
    heard: list[str] = []
    times = measure_windows(measured, runners, heard.append)
    count = len(heard) // len(MEASURED)
    turns = [heard[i * len(MEASURED) : (i + 1) * len(MEASURED)] for i in range(count)]
    assert turns == [list(MEASURED)[:: -1 if i % 2 else 1] for i in range(count)]
    return {
        scheme: [
            (step.straggler, step.compute, step.exposed, step.wait, step.load, step.sent)
            for step in steps
        ]
        for scheme, steps in times.items()
    }


def test_a_steps_parts_add_up_to_its_straggler_and_all_ranks_agree(ranks4: RankPool) -> None:
    found = ranks4.run(times_case, _whole_batch(JOBS[4][1], 4))
    assert all(each == found[0] for each in found)
    for scheme, steps in found[0].items():
        for straggler, compute, exposed, wait, load, _ in steps:
            assert straggler == pytest.approx(compute + exposed + wait)
            assert compute > 0 and exposed > 0 and wait >= 0 and load > 0
        if scheme in ("ring", "ulysses"):
            assert any(step[5] for step in steps)
