"""`libra bench attention`: schemes next to each other on real ranks, on windows of any corpus.

torchrun --standalone --nproc-per-node 2 -m libra.cli.main bench attention LENGTHS
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from libra.bench.options import BenchOptions
from libra.bench.results import BASELINE, PARTS, BenchResult, SchemeResult
from libra.cli.console import table_console, writing
from libra.extras import check_installed


def run_bench(options: BenchOptions) -> int:
    """Measure and print; the exit code.  Raises the same ValueError on every rank."""
    check_installed("torch", "the benchmark")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        raise ValueError(
            "libra bench runs under torchrun: torchrun --standalone --nproc-per-node 2 "
            "-m libra.cli.main bench attention LENGTHS"
        )
    # The profiler's library logs each start and stop to stderr, unless this is set on loading.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from libra.bench.run import run_ranks, trace_path  # torch comes with it

    result = run_ranks(options)
    if result is None:  # another rank than the first
        return 0
    console = table_console(140)
    print_result(result, console)
    if options.json is not None:
        text = json.dumps(asdict(result), indent=1, default=str)
        with writing("--json", options.json):
            options.json.write_text(text + "\n", encoding="utf-8")
        console.print(f"written to {options.json}", highlight=False, markup=False)
    if options.trace is not None:
        first = f"{trace_path(options.trace, 0)} and so on, one file a rank"
        console.print(f"written to {first}", highlight=False, markup=False)
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
    relative = BASELINE in result.schemes
    title = "straggler time of one attention layer, forward and backward"
    table = Table(title=title + (", Ulysses = 1" if relative else ""))
    table.add_column("scheme")
    rows = {key: _cells(scheme) for key, scheme in result.schemes.items()}
    # Every row has the same columns, because Ulysses is in the run for all schemes or for none.
    for name in next(iter(rows.values())):
        table.add_column(name, justify="right")
    for key, cells in rows.items():
        table.add_row(result.names[key], *cells.values())
    console.print(table)
    console.print(
        "max: the slowest step of a window.  mean = compute + exposed + wait, means over ranks"
        f"{'' if relative else ', in ms'}.\nTAP and TAP + VRSP run without overlap: chunks=1.",
        highlight=False,
    )


def _cells(scheme: SchemeResult) -> dict[str, str]:
    """A row by its columns; where Ulysses ran, the parts of the mean are over its mean."""
    mean, ratios = scheme.mean, scheme.of_ulysses
    times = {"mean ms": mean.straggler, "max ms": scheme.slowest.straggler}
    shares, gains = {}, {}
    if ratios is None:
        times |= {part: getattr(mean, part) for part in PARTS}
    else:
        shares = {"mean": ratios.straggler, "max": ratios.slowest}
        shares |= {part: getattr(ratios, part) for part in PARTS}
        gains = {"speedup": ratios.speedup, "in CPU s": ratios.cpu_speedup}
        gains["by loads"] = ratios.predicted
    return {
        **{name: f"{seconds * 1e3:.1f}" for name, seconds in times.items()},
        **{name: f"{share:.3f}" for name, share in shares.items()},
        **{name: f"{gain:.2f}x" for name, gain in gains.items()},
        "MB sent": f"{mean.sent / 1e6:.1f}",
    }
