"""One rank's part of `libra bench`: join the job, check with all ranks, and measure."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed.device_mesh import init_device_mesh

from libra.bench.measure import BenchRank, measure_windows, prepare_step, write_profile
from libra.bench.options import DTYPES, BenchOptions, check_options, read_windows
from libra.bench.results import BenchResult, StepTimes, compare
from libra.bench.runner import SchemeRunner, close_pools, make_runners
from libra.data.packing import Packs
from libra.plan.pool_plan import fingerprint
from libra.runtime.consensus import reach_consensus
from libra.runtime.kernels import kernel_for
from libra.runtime.speed import Stopwatch, TimedKernel


def run_ranks(options: BenchOptions) -> BenchResult | None:
    """Under torchrun, on every rank; the result on rank 0, None on the others.

    Raises the same ValueError on all ranks.
    """
    device = _device(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = timedelta(seconds=options.timeout if 0 < options.timeout < 1e6 else 300)
    # gloo always: options that ranks compare, and times, are in the CPU's memory.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timeout)
    try:
        here, windows = _checked(options, device)
        return _run(options, here, windows, timeout)
    finally:
        dist.destroy_process_group()


def trace_path(path: Path, rank: int) -> Path:
    """The file of one rank: `trace.json` becomes `trace.rank0.json`."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _device(options: BenchOptions) -> torch.device:
    """This rank's device.  `_checked` refuses a device that is not there, on all ranks together."""
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _checked(options: BenchOptions, device: torch.device) -> tuple[BenchRank, list[Packs]]:
    """Check everything; then all ranks go on, or all raise."""
    # A rank that finds a problem must not leave before the others know of it.
    problem, windows, kernel = None, [], None
    try:
        check_options(options, dist.get_world_size())
        if options.device == "cuda" and device.type == "cpu":
            raise ValueError("--device cuda: no CUDA device is usable here")
        kernel = kernel_for(device, options.kernel)
        windows = read_windows(options, dist.get_world_size() // options.cp)
    except ValueError as error:
        problem = " ".join(str(error).split())
    world = dist.group.WORLD
    assert world is not None
    digest = [fingerprint(window.lengths.tobytes()) for window in windows]
    facts = {"options": asdict(options), "corpus": digest, "device": device.type}
    reach_consensus(world, "libra bench", problem, facts)
    assert kernel is not None
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    here = BenchRank(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        cp=options.cp,
        device=device,
        dtype=getattr(torch, dtype),
        heads=options.head_shape(DTYPES[dtype]),
        kernel=TimedKernel(kernel, Stopwatch()),
    )
    return here, windows


def _run(
    options: BenchOptions, here: BenchRank, windows: Sequence[Packs], timeout: timedelta
) -> BenchResult | None:
    dp = here.world // here.cp
    mesh = init_device_mesh(here.device.type, (dp, here.cp), mesh_dim_names=("dp", "cp"))
    runners = make_runners(options.schemes, mesh, options.config, here.kernel, timeout=timeout)
    with _progress(len(runners) * len(windows) * options.global_batch // dp, here) as done:
        times = measure_windows(
            windows, runners, here, layers=options.layers, wlb=options.wlb, done=done
        )
    if options.trace is not None:
        runs = _slowest_steps(options, runners, windows, times, here)
        write_profile(runs, here, trace_path(options.trace, here.rank))
    close_pools(runners)
    if here.rank:
        return None
    return BenchResult(
        created=date.today().isoformat(),
        machine=_machine(here),
        ranks=here.world,
        dp=dp,
        kernel=here.kernel.name,
        dtype=str(here.dtype).removeprefix("torch."),
        settings=options,
        names={scheme.key: scheme.label for scheme in options.schemes},
        schemes=compare(times),
    )


def _slowest_steps(
    options: BenchOptions,
    runners: Sequence[SchemeRunner],
    windows: Sequence[Packs],
    times: Mapping[str, Sequence[StepTimes]],
    here: BenchRank,
) -> dict[str, Callable[[], None]]:
    """A call that runs each scheme's slowest step, by the scheme's label."""
    runs = {}
    for runner in runners:
        slowest = max(times[runner.scheme.key], key=lambda step: step.straggler)
        window = windows[slowest.window]
        step = runner.steps(window, options.wlb)[slowest.step]
        _, run = prepare_step(runner, window, step, here, options.seed)
        run()  # makes index maps
        runs[runner.scheme.label] = run
    return runs


@contextmanager
def _progress(steps: int, here: BenchRank) -> Iterator[Callable[[str], None]]:
    """A bar on rank 0's terminal."""
    console = Console(stderr=True)
    if here.rank or not console.is_terminal:
        yield lambda scheme: None
        return
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda scheme: bar.update(task, advance=1, description=scheme)


def _machine(here: BenchRank) -> str:
    name = f"{platform.machine()} CPU, cores: {os.cpu_count()}, threads a rank: "
    name += str(torch.get_num_threads())
    if here.device.type == "cuda":
        name = torch.cuda.get_device_name(here.device)
    python = ".".join(map(str, sys.version_info[:2]))
    return f"{here.world} ranks on {name}; torch {torch.__version__}, Python {python}"
