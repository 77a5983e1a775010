"""`libra bench attention`: schemes next to each other on real ranks, on windows of any corpus.

torchrun --standalone --nproc-per-node 2 -m libra.cli.main bench attention LENGTHS
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.table import Table

from libra.bench.options import BenchOptions
from libra.bench.results import BenchResult, Means, SchemeResult
from libra.cli.console import table_console, writing
from libra.extras import check_installed

_PIPE_COLUMNS: Final = 140
_PARTS: Final = ("compute", "exposed", "wait")


def run_bench(options: BenchOptions) -> int:
    """Measure and print; the exit code.  Raises the same ValueError on every rank."""
    check_installed("torch", "the benchmark")
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ValueError(
            "libra bench runs under torchrun: torchrun --standalone --nproc-per-node 2 "
            "-m libra.cli.main bench attention LENGTHS"
        )
    # The profiler's library logs each start and stop to stderr, unless this is set on loading.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from libra.bench.run import run_ranks, trace_path  # torch comes with it

    result = run_ranks(options)
    if result is None:
        return 0
    console = table_console(_PIPE_COLUMNS)
    print_result(result, console)
    if options.json is not None:
        text = json.dumps(asdict(result), indent=1, default=str)
        with writing("--json", options.json):
            options.json.write_text(text + "\n", encoding="utf-8")
        console.print(f"written to {options.json}", highlight=False, markup=False)
    if options.trace is not None:
        first = trace_path(options.trace, 0)
        console.print(
            f"written to {first} and so on, one file a rank", highlight=False, markup=False
        )
    return 0


def print_result(result: BenchResult, console: Console) -> None:
    """The run as a table."""
    options = result.settings
    console.print(
        f"{result.machine}; DP {result.dp}, CP {options.cp}; packs of {options.tokens:,} "
        f"tokens, {options.global_batch} a window, windows: {options.windows}; "
        f"heads {options.heads}/{options.kv_heads}/{options.head_dim}",
        highlight=False,
        markup=False,
    )
    relative = any(each.of_ulysses is not None for each in result.schemes.values())
    title = "straggler time of one attention layer, forward and backward"
    table = Table(title=title + (", Ulysses = 1" if relative else ""))
    table.add_column("scheme")
    columns = ["mean ms", "max ms", *_PARTS, "MB sent"]
    if relative:
        columns[2:2] = ["mean", "max"]
        columns[-1:-1] = ["speedup", "in CPU s", "by loads"]
    for name in columns:
        table.add_column(name, justify="right")
    for key, scheme in result.schemes.items():
        table.add_row(result.names[key], *_cells(scheme))
    console.print(table)
    console.print(
        "max: the slowest step of a window.  mean = compute + exposed + wait, means over ranks"
        f"{'' if relative else ', in ms'}.\nTAP and TAP + VRSP run without overlap: chunks=1.",
        highlight=False,
    )


def _cells(scheme: SchemeResult) -> Iterator[str]:
    yield from (f"{means.straggler * 1e3:.1f}" for means in (scheme.mean, scheme.slowest))
    ratios = scheme.of_ulysses
    if ratios is None:
        yield from (f"{part * 1e3:.1f}" for part in _parts(scheme.mean))
    else:
        yield from (f"{means.straggler:.3f}" for means in (ratios.mean, ratios.slowest))
        yield from (f"{part:.3f}" for part in _parts(ratios.mean))
        yield from (
            f"{gain:.2f}x" for gain in (ratios.speedup, ratios.cpu_speedup, ratios.predicted)
        )
    yield f"{scheme.megabytes:.1f}"


def _parts(means: Means) -> tuple[float, float, float]:
    return means.compute, means.exposed, means.wait
