"""One rank's part of `libra bench`: join the job, check with all ranks, and measure."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date, timedelta
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed.device_mesh import init_device_mesh

from libra.bench.measure import BenchJob, measure_windows, prepare_step, write_profile
from libra.bench.options import BenchOptions, check_options, read_windows
from libra.bench.results import BenchResult, StepTimes, compare
from libra.bench.runner import SchemeRunner, make_runners
from libra.plan.pool_plan import fingerprint
from libra.runtime.consensus import reach_consensus
from libra.runtime.kernels import kernel_for
from libra.runtime.speed import Stopwatch, TimedKernel


def run_ranks(options: BenchOptions) -> BenchResult | None:
    """Under torchrun, on every rank; the result on rank 0, None on the others.

    Raises the same ValueError on all ranks.
    """
    device = torch.device("cpu")
    # `_checked_job` refuses a GPU that is not there, on all ranks together.
    if options.device != "cpu" and torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = timedelta(seconds=options.timeout if 0 < options.timeout < 1e6 else 300)
    # gloo always: options that ranks compare, and times, are in the CPU's memory.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timeout)
    try:
        return _run(_checked_job(options, device), timeout)
    finally:
        dist.destroy_process_group()


def trace_path(path: Path, rank: int) -> Path:
    """The file of one rank: `trace.json` becomes `trace.rank0.json`."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _checked_job(options: BenchOptions, device: torch.device) -> BenchJob:
    """Check everything; then all ranks go on, or all raise."""
    # A rank that finds a problem must not leave before the others know of it.
    problem, windows, kernel = None, [], None
    try:
        check_options(options, dist.get_world_size())
        if options.device == "cuda" and device.type == "cpu":
            raise ValueError("--device cuda: no CUDA device is usable here")
        kernel = kernel_for(device, options.kernel)
        windows = read_windows(options)
    except ValueError as error:
        problem = " ".join(str(error).split())
    world = dist.group.WORLD
    assert world is not None
    digest = [fingerprint(window.lengths.tobytes()) for window in windows]
    facts = {"options": asdict(options), "corpus": digest, "device": device.type}
    reach_consensus(world, "libra bench", problem, facts)
    # Problems of any rank have been raised by now, on all ranks.
    assert kernel is not None
    best = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, best if options.dtype == "auto" else options.dtype)
    return BenchJob(
        options=options,
        windows=windows,
        heads=options.head_shape(dtype.itemsize),
        dtype=dtype,
        device=device,
        kernel=TimedKernel(kernel, Stopwatch()),
        world=world,
    )


def _run(job: BenchJob, timeout: timedelta) -> BenchResult | None:
    options, device, ranks = job.options, job.device, dist.get_world_size()
    dp = ranks // options.cp
    mesh = init_device_mesh(device.type, (dp, options.cp), mesh_dim_names=("dp", "cp"))
    runners = make_runners(options.schemes, mesh, options.config, job.kernel, timeout=timeout)
    with _progress(len(runners) * options.windows * options.global_batch // dp) as done:
        times = measure_windows(job, runners, done)
    if options.trace is not None:
        # Every scheme is planned before the profiler starts, which would record the planning.
        runs = {each.scheme.label: _slowest_step(job, each, times) for each in runners}
        write_profile(runs, device, trace_path(options.trace, dist.get_rank()))
    for pool in {runner.pool for runner in runners if runner.pool is not None}:
        pool.close()
    if dist.get_rank():
        return None
    return BenchResult(
        created=date.today().isoformat(),
        machine=_machine(device),
        ranks=ranks,
        dp=dp,
        kernel=job.kernel.name,
        dtype=str(job.dtype).removeprefix("torch."),
        settings=options,
        names={scheme.key: scheme.label for scheme in options.schemes},
        schemes=compare(times),
    )


def _slowest_step(
    job: BenchJob, runner: SchemeRunner, times: Mapping[str, Sequence[StepTimes]]
) -> Callable[[], None]:
    """A call that runs the scheme's slowest step."""
    slowest = max(times[runner.scheme.key], key=attrgetter("straggler"))
    window = job.windows[slowest.window]
    step = runner.steps(window, job.options.wlb)[slowest.step]
    _, run = prepare_step(job, runner, window, step, job.options.seed)
    run()  # makes index maps
    return run


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on rank 0's terminal."""
    console = Console(stderr=True)
    hidden = dist.get_rank() > 0 or not console.is_terminal
    columns = TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn()
    elapsed = TimeElapsedColumn()
    with Progress(*columns, elapsed, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=steps)
        yield lambda scheme: bar.update(task, advance=1, description=scheme)


def _machine(device: torch.device) -> str:
    name = f"{platform.machine()} CPU, cores: {os.cpu_count()}, threads a rank: "
    name += str(torch.get_num_threads())
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{dist.get_world_size()} ranks on {name}; torch {torch.__version__}, Python {python}"
