"""Is Libra right and quick on this GPU?  One command, under five minutes:

    python benchmarks/gpu_check.py --json gpu-check.json --table kernels.json

Checks every attention kernel that imports against dense fp64 attention; checks two and four ranks
on this one device against plain attention, with and without chunks; looks whether planning hides
behind compute; measures what a layer costs besides its kernel for 1, 8, 64 and 512 segments; and
measures how fast the kernel runs by block length and heads, into a kernel table that
`libra simulate` reads.  Exits 1 if something is wrong.

Without a GPU it says so and exits 0.  `--device cpu` runs the same checks on the CPU, smaller.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

import libra
from benchmarks.gpu.correctness import LIMITS, cases, check_kernel
from benchmarks.gpu.layers import PARTS, equal_bounds, layer_overhead
from benchmarks.gpu.stopwatch import Watched
from libra.bench.runner import random_rows
from libra.cli.calibrate import measure_table
from libra.cost.kernel_table import KernelTable, check_suffix, write_kernel_table
from libra.runtime.kernels import kernel_for, kernel_names
from libra.runtime.measure import Repeats, find_machine
from libra.simulate.calibrate import Grid

SEGMENTS = (1, 8, 64, 512)


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to check."""

    device: Literal["cuda", "cpu"] = "cuda"
    json: Path | None = None
    """Write everything that was found there."""
    table: Path | None = None
    """Write the measured kernel table there (.json or .toml)."""
    kernel: str | None = None
    """Kernel of the layers and the table; by default the best that imports."""
    worlds: tuple[int, ...] | None = None
    """Ranks that share the device; by default 2 and 4, on a CPU 2."""
    repeats: int | None = None
    """Passes of each layer whose overhead is measured; by default 10, on a CPU 3."""

    def __post_init__(self) -> None:
        """ValueError for what cannot be written or run."""
        if self.table is not None:
            check_suffix(self.table)
        if self.worlds is not None and min(self.worlds, default=0) < 2:
            given = " ".join(map(str, self.worlds))
            raise ValueError(f"--worlds is {given}; give numbers of at least 2")
        for name, path in (("json", self.json), ("table", self.table)):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"--{name} {path}: there is no folder {path.parent}; make it")
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"--repeats is {self.repeats}; give a number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is checked on a device."""

    dtypes: tuple[torch.dtype, ...]
    worlds: tuple[int, ...]
    rank_tokens: int
    layers: int
    """Layers behind which a plan may hide."""
    tokens: int
    """Of a layer whose overhead is measured."""
    heads: libra.HeadShape
    repeats: int
    grid: Grid


SIZES = {
    "cuda": Size(
        dtypes=(torch.bfloat16, torch.float16),
        worlds=(2, 4),
        rank_tokens=2048,
        layers=8,
        tokens=16_384,
        heads=libra.HeadShape(16, 4, 128, 2),
        repeats=10,
        grid=Grid(
            q_len=(16, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            k_per_q=(1, 4, 16),
            heads=(1, 4, 16),
            rows=16_384,
            longest=65_536,
            flops=2e13,
            matmul_size=8192,
        ),
    ),
    "cpu": Size(
        dtypes=(torch.float32, torch.bfloat16),
        worlds=(2,),
        rank_tokens=512,
        layers=2,
        tokens=1024,
        heads=libra.HeadShape(4, 2, 64, 4),
        repeats=3,
        grid=Grid(
            q_len=(16, 128, 512),
            k_per_q=(1, 4),
            heads=(1, 4),
            rows=512,
            longest=1024,
            flops=1e8,
            matmul_size=512,
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, write."""
    args = tyro.cli(Args, args=arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "skipped: no CUDA device is usable here; --device cpu runs the same checks on the CPU"
        )
        return 0
    if args.kernel is not None:
        try:
            kernel_for(torch.device(args.device), args.kernel)
        except ValueError as error:
            print(f"--kernel: {error}")
            return 2
    begun, size, console = time.perf_counter(), SIZES[args.device], Console()
    size = replace(size, repeats=args.repeats or size.repeats)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    kernels, absent = usable_kernels(device)
    for name, reason in absent.items():
        console.print(f"kernel {name} is not here: {reason}", markup=False, highlight=False)
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if args.device == "cuda" else "cpu",
        "machine": f"{platform.machine()}, CPUs: {os.cpu_count()}",
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "absent": absent,
        "kernels": check_kernels(kernels, device, size, small=args.device == "cpu"),
        "ranks": [],
        "seconds": {},
    }
    seconds = found["seconds"]
    seconds["kernels"] = time.perf_counter() - begun
    for world in args.worlds or size.worlds:
        begun_ranks = time.perf_counter()
        found["ranks"].append(run_ranks(world, args, size))
        seconds[f"{world} ranks"] = time.perf_counter() - begun_ranks
    begun_layers = time.perf_counter()
    found["overhead"] = check_overhead(device, args.kernel, size)
    seconds["overhead"] = time.perf_counter() - begun_layers
    table = kernel_table(args, size, console)
    found["efficiency"] = efficiency(table)
    if args.table is not None:
        write_kernel_table(table, args.table)
    seconds["all"] = time.perf_counter() - begun
    wrong = problems(found)
    found["wrong"] = wrong
    report(found, table, console)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if wrong else 0


def usable_kernels(device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Kernels that import here, and why the others don't."""
    usable, absent = [], {}
    for name in kernel_names(device):
        try:
            kernel_for(device, name)
        except ValueError as error:
            absent[name] = str(error).partition("tried ")[2] or str(error)
        else:
            usable.append(name)
    return usable, absent


def check_kernels(
    names: Sequence[str], device: torch.device, size: Size, *, small: bool
) -> list[dict[str, Any]]:
    """Every kernel on every case and dtype; an error that is raised is a finding, too."""
    found = []
    for name in names:
        kernel = kernel_for(device, name)
        for dtype in size.dtypes:
            for case in cases(small):
                row: dict[str, Any] = {"kernel": name, "dtype": str(dtype), "case": case.name}
                try:
                    row["errors"] = check_kernel(kernel, case, device, dtype)
                    row["limit"] = LIMITS[dtype]
                except (RuntimeError, ValueError, TypeError) as error:
                    row["raised"] = f"{type(error).__name__}: {error}"
                found.append(row)
    return found


def run_ranks(world: int, args: Args, size: Size) -> dict[str, Any]:
    """Several ranks on the one device; what rank 0 found, or how they failed."""
    device_plan = Path(__file__).parent / "gpu" / "rank.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(prefix="libra-gpu-check-") as folder:
        place = Path(folder)
        shared = {
            "world": world,
            "tokens": size.rank_tokens,
            "layers": size.layers,
            "repeats": size.repeats,
            "device": args.device,
            "dtype": str(size.dtypes[0]).removeprefix("torch."),
            "store": place / "store",
            "out": place / "found.json",
        } | ({} if args.kernel is None else {"kernel": args.kernel})
        options = [text for name, value in shared.items() for text in (f"--{name}", str(value))]
        ranks = []
        try:
            for rank in range(world):
                with open(place / f"{rank}.log", "w") as log:
                    command = [sys.executable, str(device_plan), "--rank", str(rank), *options]
                    ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            until = time.monotonic() + 120
            for started in ranks:
                started.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            pass  # told by what has no exit code
        finally:
            codes = [started.poll() for started in ranks]
            for started in ranks:
                started.kill()
                started.wait()
        if any(codes) or None in codes:
            said = [(place / f"{rank}.log").read_text()[-1500:] for rank in range(world)]
            return {"world": world, "failed": f"exit codes {codes}", "logs": said}
        return dict(json.loads((place / "found.json").read_text()))


def check_overhead(device: torch.device, kernel: str | None, size: Size) -> list[dict[str, Any]]:
    """One rank, nothing moves: a layer against its kernel by number of segments."""
    found = []
    with tempfile.TemporaryDirectory(prefix="libra-gpu-check-") as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
            config = libra.PoolConfig(pool_size=1)
            watched = Watched(kernel_for(device, kernel))
            pool = libra.SequencePool(mesh, config, heads=size.heads, kernel=watched)
            tensors = random_rows(size.tokens, size.heads, size.dtypes[0], device, seed=0)
            for segments in SEGMENTS:
                microbatch = pool.microbatch(equal_bounds(size.tokens, segments))
                microbatch.plan(size.heads)
                row = layer_overhead(microbatch, watched, tensors, repeats=size.repeats)
                found.append({"segments": segments, **row})
            pool.close()
        finally:
            dist.destroy_process_group()
    return found


def kernel_table(args: Args, size: Size, console: Console) -> KernelTable:
    """Efficiency by block length, keys and heads."""
    machine = find_machine(args.device, kernel=args.kernel, dtype=None)
    return measure_table(
        machine,
        size.grid,
        dim=size.heads.dim,
        heads_per_kv=size.heads.group,
        repeats=Repeats(warm_up=1, least=2, most=10, seconds=0.05),
        console=console,
    )


def efficiency(table: KernelTable) -> dict[str, Any]:
    """The table in plain values."""
    arrays = ("q_len", "k_per_q", "heads", "forward", "backward")
    plain = {name: getattr(table, name).tolist() for name in arrays}
    return {"source": table.source, "peak_flops": table.peak_flops, **plain}


def problems(found: dict[str, Any]) -> list[str]:
    """What is wrong, in words; empty if all is well."""
    wrong = []
    for row in found["kernels"]:
        what = f"{row['kernel']}, {row['dtype']}, {row['case']}"
        if "raised" in row:
            wrong.append(f"{what}: {row['raised']}")
        elif not max(row["errors"].values()) <= row["limit"]:
            wrong.append(f"{what}: errors {row['errors']}")
    limit = LIMITS[SIZES["cpu" if found["device"] == "cpu" else "cuda"].dtypes[0]]
    for ranks in found["ranks"]:
        if "failed" in ranks:
            wrong.append(f"{ranks['world']} ranks: {ranks['failed']}: {ranks['logs'][0][-400:]}")
            continue
        for row in ranks["outputs"]:
            if not max(row["errors"].values()) <= limit:
                wrong.append(f"{ranks['world']} ranks, M {row['chunks']}: errors {row['errors']}")
    for row in found.get("overhead", []):
        if row["waits_for_device"]:
            where = ", ".join(row["waits_for_device"])
            wrong.append(f"layer of {row['segments']} segments: the host waits at {where}")
    if not found["kernels"]:
        wrong.append("no attention kernel imports here")
    return wrong


def report(found: dict[str, Any], table: KernelTable, console: Console) -> None:
    """Print the short table."""
    shown = Table(title=f"{found['device']}, {found['date']}, torch {found['torch']}")
    for column in ("check", "result", "figures"):
        shown.add_column(column)
    for name in dict.fromkeys(row["kernel"] for row in found["kernels"]):
        rows = [row for row in found["kernels"] if row["kernel"] == name]
        worst = max((max(row["errors"].values()) for row in rows if "errors" in row), default=0.0)
        bad = any(
            "raised" in row or not max(row["errors"].values()) <= row["limit"] for row in rows
        )
        shown.add_row(
            f"kernel {name}", "wrong" if bad else "right", f"{len(rows)} cases, worst {worst:.1e}"
        )
    for ranks in found["ranks"]:
        name = f"{ranks['world']} ranks"
        if "failed" in ranks:
            shown.add_row(name, "failed", ranks["failed"])
            continue
        worst = max(max(row["errors"].values()) for row in ranks["outputs"])
        moved = max(row["moved_bytes"] for row in ranks["outputs"]) / 1e6
        bad = any(text.startswith(f"{name},") for text in found["wrong"])
        figures = f"worst {worst:.1e}, {moved:.1f} MB moved a layer"
        shown.add_row(name, "wrong" if bad else "right", figures)
        plan = ranks["planner"]
        hidden = plan["waited_seconds"] < 0.5 * plan["plan_seconds"]
        figures = (
            f"plan and its exchange {1e3 * plan['plan_seconds']:.1f} ms, waited for "
            f"{1e3 * plan['waited_seconds']:.1f} ms behind {1e3 * plan['layers_seconds']:.0f} ms "
            "of layers"
        )
        shown.add_row("planner", "hidden" if hidden else "not hidden", figures)
    for row in found["overhead"]:
        figures = ", ".join(
            f"{way} {1e6 * row[f'bare {way}']:.0f} us + {1e6 * row[f'{way} extra']:.0f}"
            for way in ("forward", "backward")
        )
        parts = ", ".join(f"{part} {1e6 * row['parts'][part]:.0f}" for part in PARTS)
        shown.add_row(f"layer of {row['segments']} segments", figures, parts)
    tera, widest = table.peak_flops / 1e12, str(table.heads[-1])
    for q, forward, backward in zip(table.q_len, table.forward, table.backward, strict=True):
        rates = f"forward {forward[0, -1] * tera:.3g}, backward {backward[0, -1] * tera:.3g}"
        share = f"of {tera:.3g} TFLOP/s, a matrix product's"
        shown.add_row(f"blocks of {q}, heads {widest}", rates, share)
    console.print(shown)
    for text in found["wrong"]:
        console.print(f"WRONG: {text}", markup=False, highlight=False)
    console.print(f"{found['seconds']['all']:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
