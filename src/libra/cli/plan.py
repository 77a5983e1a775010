"""`libra plan`: plan one pool of a corpus offline, on this machine's CPU, and show the plan."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from libra.cli.choose_pool import choose_pool
from libra.cli.console import check_outputs, table_console, writing
from libra.cli.plan_report import PlanReport, report_plan
from libra.cli.plan_table import print_plan
from libra.cli.plan_trace import plan_trace
from libra.config import HeadShape, PoolConfig, check_count
from libra.corpus import load_lengths
from libra.cost.attention_time import AttentionTime
from libra.cost.description import describe
from libra.cost.published import cluster_table
from libra.extras import check_installed

File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
PLOT_SUFFIXES = (".svg", ".png")
_PIPE_COLUMNS = 120
"""Width of the tables where no terminal says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Plan one pool of a corpus on this machine's CPU; show who computes and sends what."""

    lengths: tyro.conf.Positional[Path]
    """Sample lengths in tokens: a .npy of integers, text with integers separated by commas or white
    space, or a corpus (Parquet, Arrow, JSONL, Megatron .idx, or the folder of a Hugging Face
    dataset); - for standard input.  Samples longer than a pack are dropped.
    """

    tokens: int = 262_144
    """L: tokens of a pack."""

    cp: int = 8
    """Context-parallel size: workers that share one pack."""

    global_batch: int = 128
    """Packs of a window, the packs of one optimizer step."""

    window: int = 0
    """Which window of the corpus, counted from 0."""

    pool: int = 0
    """Which pool of the window, counted from 0 in the order of VRSP."""

    heads: int = 128
    """Query heads."""

    kv_heads: int = 16
    """Key/value heads."""

    head_dim: int = 256
    """Elements of a head."""

    bytes: int = 2
    """Bytes of an element: 2 for bf16 and fp16, 4 for fp32."""

    cluster: str = "h100"
    """Cluster whose times are modelled: a preset (a100, h100, h200, b200), or a TOML file with a
    [cluster] section.  Its [model] and [parallelism] sections take the place of the options above.
    """

    kernels: File = None
    """A table that `libra calibrate` wrote; by default published figures for the GPU."""

    config: PoolConfig = field(default_factory=PoolConfig)
    """Settings of the pool.  The cluster sets ranks_per_node, unless it is given."""

    json: File = None
    """Write all figures to this file."""

    trace: File = None
    """Write the modelled timeline to this file, for ui.perfetto.dev or chrome://tracing."""

    plot: File = None
    """Draw load and traffic into this .svg or .png file.  Needs the extra `report`."""


def run_plan(options: PlanOptions, console: Console | None = None) -> int:
    """Plan, print and write; the exit code.

    Raises ValueError for options and files that cannot be used, before anything is printed.
    """
    _check(options)
    console = console or table_console(_PIPE_COLUMNS)
    # Step 1: the cluster; sections of its file take the place of options.
    described = describe(options.cluster)
    tokens, cp, batch, tp = options.tokens, options.cp, options.global_batch, 1
    if (spread := described.parallelism) is not None:
        tokens, cp, batch, tp = spread.tokens, spread.cp, spread.global_batch, spread.tp
    if described.model is not None:
        heads = described.model.heads(tp=tp, bytes=options.bytes)
    else:
        heads = HeadShape(
            q=options.heads, kv=options.kv_heads, dim=options.head_dim, bytes=options.bytes
        )
    # Step 2: the pool, its plan and the report.
    chosen = choose_pool(
        load_lengths(options.lengths),
        tokens=tokens,
        global_batch=batch,
        pool_size=options.config.pool_size,
        window=options.window,
        pool=options.pool,
        file=options.lengths.name,
    )
    table = cluster_table(described.cluster, heads, options.kernels)
    report = report_plan(
        chosen,
        tokens=tokens,
        cp_size=cp,
        config=described.cluster.with_nodes(options.config, tp=tp),
        heads=heads,
        attention=AttentionTime(cluster=described.cluster, table=table, tp=tp),
    )
    # Step 3: files first, so that an unwritable one is reported before anything is printed.
    _write(options, report)
    print_plan(report, console)
    for what, path in (("Figures", options.json), ("Trace", options.trace), ("Plot", options.plot)):
        if path is not None:
            console.print(f"{what:<10} {path}", highlight=False, markup=False)
    return 0


def _check(options: PlanOptions) -> None:
    """ValueError for what no plan can be made or written with.

    Not done when the options are made: errors raised while tyro parses reach the user wrapped in
    its own words.
    """
    for name in ("tokens", "cp", "heads", "kv_heads", "head_dim", "bytes"):
        check_count(f"--{name.replace('_', '-')}", getattr(options, name))
    if options.plot is not None:
        if options.plot.suffix not in PLOT_SUFFIXES:
            raise ValueError(
                f"--plot {options.plot} ends in {options.plot.suffix!r}; name a file that ends in "
                + " or ".join(PLOT_SUFFIXES)
            )
        for package in ("altair", "vl_convert"):
            check_installed(package, "--plot")
    # The corpus may take minutes to read, so files are checked first.
    files = {f"--{name}": getattr(options, name) for name in ("json", "trace", "plot")}
    check_outputs(files, corpus=options.lengths, make_folders=True)


def _write(options: PlanOptions, report: PlanReport) -> None:
    """Write the files that were asked for."""
    if options.json is not None:
        with writing("--json", options.json):
            options.json.write_text(report.to_json() + "\n")
    if options.trace is not None:
        origin = report.origin
        about = {
            "pool": f"pool {origin.pool} of window {origin.window} of {origin.file}",
            "modelled": "one layer, forward and then backward; no measurement",
        }
        trace = plan_trace(report.lines, cp_size=report.plan.cp_size, about=about)
        with writing("--trace", options.trace):
            options.trace.write_text(json.dumps(trace) + "\n")
    if options.plot is not None:
        from libra.cli.plan_plot import draw_plan  # an extra, and slow to import

        with writing("--plot", options.plot):
            draw_plan(report, options.plot)
