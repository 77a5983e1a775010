"""`libra calibrate`: measure this machine's attention kernel and matrix products, and write the
kernel table that the simulator reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

from libra.cli.console import check_outputs, writing
from libra.cli.units import show_seconds
from libra.config import check_count
from libra.cost.kernel_table import KernelTable, check_suffix, write_kernel_table
from libra.extras import check_installed
from libra.simulate.calibrate import EMPTY, GRIDS, Device, Grid, fit_table

if TYPE_CHECKING:
    from libra.runtime.measure import Machine, Repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Measure this machine's attention kernel; write the table for the simulator."""

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
    """Query heads that share one key/value head, as far as a call has them."""

    quick: bool = False
    """Measure a small grid, with few repeats."""


def run_calibrate(options: CalibrateOptions, console: Console | None = None) -> int:
    """Measure, write and show; the exit code.  ValueError for options that cannot be used."""
    check_installed("torch", "calibration")
    check_suffix(options.out)
    check_count("--head-dim", options.head_dim)
    check_count("--heads-per-kv", options.heads_per_kv)
    check_outputs({"--out": options.out})
    from libra.runtime.measure import Repeats, find_machine  # torch comes with it

    console = console or Console()
    table = measure_table(
        find_machine(options.device, kernel=options.kernel, dtype=options.dtype),
        GRIDS[options.device + ("-quick" if options.quick else "")],
        dim=options.head_dim,
        heads_per_kv=options.heads_per_kv,
        repeats=Repeats(seconds=0.03, least=2, warm_up=1) if options.quick else Repeats(),
        console=console,
    )
    with writing("--out", options.out):
        write_kernel_table(table, options.out)
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

    # The speeds of the table are fractions of the rate of this product.
    peak = matmul_rate(machine, grid.matmul_size, repeats=repeats)
    shapes = [EMPTY, *(shape for _, shape in grid.points(dim, heads_per_kv))]
    seconds = {
        shape: attention_seconds(machine, **asdict(shape), dim=dim, repeats=repeats)
        for shape in track(shapes, "attention calls", console=console, transient=True)
    }
    return fit_table(
        grid,
        seconds,
        peak=peak,
        source=f"libra calibrate: {machine.name}",
        dim=dim,
        heads_per_kv=heads_per_kv,
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
