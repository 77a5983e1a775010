"""`libra calibrate`: measure this machine's attention kernel and matrix products, and write the
kernel table that the simulator reads.

At every grid point (q rows, keys per row, heads) a launch of equal segments is timed, forward and
backward: as many segments as make `rows` query rows, so that a launch fills the device as a
worker's does, but no more operations than a grid point may cost.  Points whose keys would pass
`longest` take the fraction of the longest that was measured: long rectangles all run alike.
Fractions are of the rate of a large matrix product, measured first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from libra.cli.units import show_seconds
from libra.cost.kernel_table import DIRECTIONS, KernelTable, segment_flops
from libra.cost.table_file import check_suffix, write_kernel_table
from libra.data.lengths import check_count
from libra.extras import check_installed

if TYPE_CHECKING:
    from libra.runtime.measure import Machine, Repeats

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What to measure and where to write it."""

    out: Path = Path("kernels.json")
    """The file to write, .json or .toml."""

    device: Device = "cpu"
    """Where the kernel runs."""

    kernel: str | None = None
    """Which attention kernel; the device's best by default."""

    dtype: str | None = None
    """bfloat16, float16 or float32; by default bfloat16 on a GPU and float32 on a CPU."""

    head_dim: int = 128
    """Elements of a head."""

    heads_per_kv: int = 8
    """Query heads that share one key/value head, as far as a launch has them."""

    quick: bool = False
    """Measure a small grid, with few repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which shapes are measured, and how large launches may get."""

    q_len: tuple[int, ...]
    k_per_q: tuple[int, ...]
    heads: tuple[int, ...]
    rows: int
    """Query rows of a launch, where they are not too many operations."""
    longest: int
    """Most keys of a segment."""
    flops: float
    """Operations of a launch's forward, unless one segment has more."""
    matmul_size: int

    def shapes(self) -> Iterator[tuple[int, int, int]]:
        """Indices (q, ratio, heads) of the points to measure; their neighbours with longer keys are
        filled from them.
        """
        for i, q in enumerate(self.q_len):
            for j, ratio in enumerate(self.k_per_q):
                for k in range(len(self.heads)):
                    if j == 0 or q * ratio <= self.longest:
                        yield i, j, k


_CPU: Final = Grid(
    q_len=(1, 16, 64, 128, 512, 2048),
    k_per_q=(1, 2, 4, 16),
    heads=(1, 4),
    rows=2048,
    longest=4096,
    flops=2e9,
    matmul_size=2048,
)
_CPU_QUICK: Final = Grid(
    q_len=(1, 32, 512),
    k_per_q=(1, 4),
    heads=(1,),
    rows=4096,
    longest=2048,
    flops=5e8,
    matmul_size=1024,
)
_CUDA: Final = Grid(
    q_len=(1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384),
    k_per_q=(1, 2, 4, 8, 16, 64),
    heads=(1, 4, 16),
    rows=16_384,
    longest=131_072,
    flops=2e14,
    matmul_size=8192,
)
_CUDA_QUICK: Final = Grid(
    q_len=(16, 128, 512, 2048, 8192),
    k_per_q=(1, 4, 16),
    heads=(8,),
    rows=16_384,
    longest=32_768,
    flops=2e13,
    matmul_size=8192,
)


def run_calibrate(options: CalibrateOptions, console: Console | None = None) -> int:
    """Measure, write and show; the exit code.  ValueError for options that cannot be used."""
    check_installed("torch", "libra calibrate")
    check_suffix(options.out)
    check_count("--head-dim", options.head_dim)
    check_count("--heads-per-kv", options.heads_per_kv)
    if options.out.is_dir() or not options.out.absolute().parent.is_dir():
        raise ValueError(f"--out {options.out} cannot be written; name a file in a folder there is")
    from libra.runtime.measure import Repeats, find_machine  # torch comes with it

    machine = find_machine(options.device, kernel=options.kernel, dtype=options.dtype)
    grids = {"cpu": (_CPU, _CPU_QUICK), "cuda": (_CUDA, _CUDA_QUICK)}
    grid = grids[options.device][options.quick]
    repeats = Repeats(seconds=0.03, least=2, warm_up=1) if options.quick else Repeats()
    console = console or Console()
    table = measure_table(
        machine,
        grid,
        dim=options.head_dim,
        heads_per_kv=options.heads_per_kv,
        repeats=repeats,
        console=console,
    )
    try:
        write_kernel_table(table, options.out)
    except OSError as error:
        raise ValueError(f"cannot write --out {options.out}: {error}") from error
    _print_table(table, console)
    console.print(f"written to {options.out}", highlight=False, markup=False)
    return 0


def measure_table(
    machine: Machine,
    grid: Grid,
    *,
    dim: int,
    heads_per_kv: int,
    repeats: Repeats,
    console: Console,
) -> KernelTable:
    """Measure every point of `grid` behind a progress bar."""
    from libra.runtime.measure import attention_seconds, matmul_rate

    shapes = list(grid.shapes())
    fractions = np.full((2, len(grid.q_len), len(grid.k_per_q), len(grid.heads)), np.nan)
    bar = Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("matrix product", total=len(shapes) + 2)
        peak = matmul_rate(machine, grid.matmul_size, repeats=repeats)
        bar.update(task, advance=1, description="an empty call")
        call = attention_seconds(
            machine, count=1, q_len=1, k_len=1, heads=1, kv_heads=1, dim=dim, repeats=repeats
        )
        bar.advance(task)
        for i, j, k in shapes:
            q, heads = grid.q_len[i], grid.heads[k]
            keys = q * grid.k_per_q[j]
            bar.update(task, description=f"{q} rows, {keys} keys, {heads} heads")
            one = float(segment_flops(q, keys, heads, dim, dim, direction="forward"))
            count = max(1, min(grid.rows // q, int(grid.flops // one)))
            taken = attention_seconds(
                machine,
                count=count,
                q_len=q,
                k_len=keys,
                heads=heads,
                kv_heads=max(1, heads // heads_per_kv),
                dim=dim,
                repeats=repeats,
            )
            for way, direction in enumerate(DIRECTIONS):
                # What every call costs is kept apart, but never most of a measurement.
                seconds = taken[way] - min(call[way], taken[way] / 2)
                flops = segment_flops(q, keys, heads, dim, dim, direction=direction)
                fractions[way, i, j, k] = count * float(flops) / seconds / peak
            bar.advance(task)
    for j in range(1, len(grid.k_per_q)):
        shorter = fractions[:, :, j - 1]
        fractions[:, :, j] = np.where(np.isnan(fractions[:, :, j]), shorter, fractions[:, :, j])
    return KernelTable(
        source=f"libra calibrate: {machine.name}",
        peak_flops=peak,
        matmul_flops=peak,
        key_dim=dim,
        value_dim=dim,
        q_len=np.array(grid.q_len, dtype=np.int64),
        k_per_q=np.array(grid.k_per_q, dtype=np.float64),
        heads=np.array(grid.heads, dtype=np.int64),
        forward=fractions[0],
        backward=fractions[1],
        call_seconds=call[0],
    )


def _print_table(table: KernelTable, console: Console) -> None:
    """GFLOP/s forward | backward, at the most heads."""
    shown = Table(title=f"attention, GFLOP/s forward | backward, heads: {table.heads[-1]}")
    shown.add_column("q rows", justify="right")
    for ratio in table.k_per_q:
        shown.add_column(f"keys = {ratio:g} x rows", justify="right")
    giga = table.peak_flops / 1e9
    for q, forward, backward in zip(table.q_len, table.forward, table.backward, strict=True):
        pairs = zip(forward[:, -1] * giga, backward[:, -1] * giga, strict=True)
        shown.add_row(str(q), *(f"{ahead:,.3g} | {back:,.3g}" for ahead, back in pairs))
    console.print(shown)
    console.print(f"matrix product {giga:,.0f} GFLOP/s; a call {show_seconds(table.call_seconds)}")
