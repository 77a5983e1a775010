"""One rank's part of `libra bench`: join, agree, measure, and on rank 0 print and write."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed.device_mesh import init_device_mesh

from libra.bench.contestants import SchemeRunner, make_field
from libra.bench.figures import compare, print_figures
from libra.bench.measure import Place, StepTimes, measure_windows, plan_steps, prepare_step
from libra.bench.schemes import NAMES, Scheme
from libra.bench.trace import Event, bench_trace, traced_step
from libra.cli.bench import DTYPES, BenchOptions, check_options, read_windows, settings
from libra.cli.console import table_console
from libra.config import HeadShape
from libra.data.packing import Packs
from libra.plan.wire import fingerprint
from libra.runtime.consensus import reach_consensus
from libra.runtime.kernels import kernel_for
from libra.runtime.speed import Stopwatch, TimedKernel

_PIPE_COLUMNS = 140


def run_ranks(options: BenchOptions) -> int:
    """Under torchrun, on every rank; the exit code.  Raises the same ValueError on all ranks."""
    device = _device(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = timedelta(seconds=options.timeout if 0 < options.timeout < 1e6 else 300)
    # gloo always: what ranks agree on and measure lies in the CPU's memory.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timeout)
    try:
        place, windows = _agreed(options, device)
        return _run(options, place, windows, timeout)
    finally:
        dist.destroy_process_group()


def _device(options: BenchOptions) -> torch.device:
    """This rank's device; what is wrong with it is told later, by all ranks together."""
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _agreed(options: BenchOptions, device: torch.device) -> tuple[Place, list[Packs]]:
    """Check everything, then go on with all ranks or raise with all of them."""
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
    facts = {"options": settings(options), "corpus": digest, "device": device.type}
    reach_consensus(world, "libra bench", problem, facts)
    assert kernel is not None
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    place = Place(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        cp=options.cp,
        device=device,
        dtype=getattr(torch, dtype),
        heads=HeadShape(options.heads, options.kv_heads, options.head_dim, DTYPES[dtype]),
        kernel=TimedKernel(kernel, Stopwatch()),
    )
    return place, windows


def _run(options: BenchOptions, place: Place, windows: Sequence[Packs], timeout: timedelta) -> int:
    shape = (place.world // place.cp, place.cp)
    mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=("dp", "cp"))
    field = make_field(options.scheme, mesh, options.config, place.kernel, timeout=timeout)
    steps = len(field.contestants) * len(windows) * options.global_batch // shape[0]
    with _progress(steps, place) as done:
        times = measure_windows(
            windows, field.contestants, place, layers=options.layers, wlb=options.wlb, done=done
        )
    traced = {}
    if options.trace is not None:
        for each in field.contestants:
            slowest = max(times[each.scheme], key=lambda step: step.straggler)
            traced[each.scheme] = _trace(each, windows, slowest, place, options)
    field.close()
    if place.rank == 0:
        _report(options, place, times, traced)
    return 0


def _trace(
    contestant: SchemeRunner,
    windows: Sequence[Packs],
    slowest: StepTimes,
    place: Place,
    options: BenchOptions,
) -> list[Event]:
    window = windows[slowest.window]
    step = plan_steps(contestant, window, place, options.wlb)[slowest.step]
    _, run = prepare_step(contestant, window, step, place, options.seed)
    run()
    traced_step(run, place)  # the profiler's own first time is slow
    return traced_step(run, place)


@contextmanager
def _progress(steps: int, place: Place) -> Iterator[Callable[[str], None]]:
    """A bar on rank 0's terminal."""
    console = Console(stderr=True)
    if place.rank or not console.is_terminal:
        yield lambda scheme: None
        return
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda scheme: bar.update(task, advance=1, description=scheme)


def _report(
    options: BenchOptions,
    place: Place,
    times: dict[Scheme, list[StepTimes]],
    traced: dict[Scheme, list[Event]],
) -> None:
    found = {
        "created": date.today().isoformat(),
        "machine": _machine(place),
        "ranks": place.world,
        "dp": place.world // place.cp,
        "kernel": place.kernel.name,
        "dtype": str(place.dtype).removeprefix("torch."),
        "settings": settings(options),
        "names": dict(NAMES),
        "schemes": compare(times),
    }
    console = table_console(_PIPE_COLUMNS)
    print_figures(found, console)
    about = {key: found[key] for key in ("created", "machine", "settings")}
    for path, content in (
        (options.json, found),
        (options.trace, bench_trace(traced, place, about) if traced else None),
    ):
        if path is not None:
            _write(path, content)
            console.print(f"written to {path}", highlight=False, markup=False)


def _write(path: Path, content: Any) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def _machine(place: Place) -> str:
    what = f"{platform.machine()} CPU, cores: {os.cpu_count()}, threads a rank: "
    what += str(torch.get_num_threads())
    if place.device.type == "cuda":
        what = torch.cuda.get_device_name(place.device)
    python = ".".join(map(str, sys.version_info[:2]))
    return f"{place.world} ranks on {what}; torch {torch.__version__}, Python {python}"
