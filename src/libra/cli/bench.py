"""`libra bench attention`: schemes side by side on real ranks, on the windows of any corpus.

torchrun --standalone --nproc-per-node 2 -m libra.cli.main bench attention LENGTHS
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import tyro

from libra.baselines.wlb import WlbConfig
from libra.bench.schemes import Scheme, scheme_config, window_steps
from libra.config import HeadShape, PoolConfig
from libra.corpus import Format, read_lengths
from libra.corpus.read import STDIN
from libra.data.lengths import check_count
from libra.data.packing import LongerCut, Packs
from libra.extras import check_installed
from libra.plan.head_groups import cut_heads
from libra.plan.place_ulysses import check_ulysses
from libra.plan.plan_pool import head_shards
from libra.simulate.stream_packing import Packing
from libra.simulate.windows import WindowReader

File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
DTYPES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure, and what to write."""

    what: tyro.conf.Positional[Literal["attention"]]
    """One attention layer, forward and backward."""

    lengths: tyro.conf.Positional[str]
    """A corpus: .npy, text, JSONL, Parquet, Arrow, Megatron .idx, or the folder of a Hugging Face
    dataset; every rank reads it.
    """

    scheme: tuple[Scheme, ...] = get_args(Scheme)
    """Schemes, measured in one run, step by step in alternating order."""

    tokens: int = 8192
    """L: tokens of a pack."""

    global_batch: int = 8
    """Packs of one optimizer step."""

    windows: int = 2
    """Optimizer steps, the first of the corpus."""

    cp: int = 1
    """Context-parallel ranks of a replica."""

    heads: int = 4
    """Query heads."""

    kv_heads: int = 2
    """Key/value heads."""

    head_dim: int = 64
    """Elements of a head."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run: a GPU a rank if there are any, with NCCL; else the CPU, with gloo."""

    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Of the tensors; by default bfloat16 on a GPU and float32 on a CPU."""

    kernel: str | None = None
    """Which attention kernel; the device's best by default."""

    layers: int = 1
    """Timed layers of each microbatch, of which the median counts.  One more runs before them, in
    which index maps are made.
    """

    config: PoolConfig = field(default_factory=PoolConfig)
    """Libra's pools; a pool_size above the replicas shrinks to them."""

    wlb: WlbConfig = field(default_factory=WlbConfig)
    """How WLB-LLM style packs are made."""

    packing: Packing = "sequential"
    """`sequential` cuts samples at a pack's end, `best-fit` keeps them whole and pads."""

    longer: LongerCut = "drop"
    """What becomes of samples longer than a pack: `drop`, `cut` or `refuse`."""

    format: Format | None = None
    """Format of the corpus, where it isn't plain."""

    column: str | None = None
    """Column or field that holds lengths or tokens."""

    json: File = None
    """Write everything to this file."""

    trace: File = None
    """Write real timings of each scheme's slowest step here, for Perfetto (ui.perfetto.dev)."""

    timeout: float = 300.0
    """Seconds after which a rank that waits for another gives up."""

    seed: int = 0
    """Of the random tensors."""


def run_bench(options: BenchOptions) -> int:
    """Measure and print; the exit code.  Raises the same ValueError on every rank."""
    check_installed("torch", "libra bench")
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ValueError(
            "libra bench runs under torchrun: torchrun --standalone --nproc-per-node 2 "
            "-m libra.cli.main bench attention LENGTHS"
        )
    # The profiler's library tells each start and stop on stderr, unless told not to on loading.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from libra.bench.run import run_ranks  # torch comes with it

    return run_ranks(options)


def check_options(options: BenchOptions, world: int) -> None:
    """ValueError for what no rank could run."""
    for name in ("tokens", "global_batch", "windows", "cp", "heads", "kv_heads", "head_dim"):
        check_count(f"--{name.replace('_', '-')}", getattr(options, name))
    check_count("--layers", options.layers)
    check_count("--seed", options.seed, least=0)
    if not options.scheme:
        raise ValueError("--scheme names no scheme")
    if not 0 < options.timeout < 1e6:
        raise ValueError(f"--timeout is {options.timeout}; it must be seconds > 0")
    if options.lengths == STDIN:
        raise ValueError("every rank reads the corpus, which standard input cannot serve")
    if world % options.cp:
        raise ValueError(f"--cp {options.cp} does not divide the {world} ranks of this job")
    dp = world // options.cp
    if options.global_batch % dp:
        raise ValueError(f"--global-batch {options.global_batch} is no multiple of {dp} replicas")
    if options.config.placement == "ulysses":
        raise ValueError("--config.placement ulysses has no pools; --scheme ulysses runs it")
    for scheme in dict.fromkeys(options.scheme):
        _check_scheme(options, scheme, dp)
    for name, path in (("--json", options.json), ("--trace", options.trace)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{name} {path} cannot be written; name a file in a folder there is")


def _check_scheme(options: BenchOptions, scheme: Scheme, dp: int) -> None:
    shape = HeadShape(options.heads, options.kv_heads, options.head_dim)
    config = scheme_config(scheme, options.config, dp)
    if dp % config.pool_size:
        raise ValueError(
            f"--config.pool-size {config.pool_size} does not divide the {dp} replicas of this job"
        )
    if config.placement == "ulysses":
        check_ulysses(shape, options.cp)
    if scheme != "ring":
        cut_heads(shape, head_shards(config, options.cp), config.chunks)


def read_windows(options: BenchOptions, dp: int) -> list[Packs]:
    """The corpus's first windows.  ValueError where it has fewer, or where WLB cannot pack them."""
    chunks = read_lengths(
        options.lengths, format=options.format, column=options.column, chunk=1 << 16
    )
    reader = WindowReader(
        chunks,
        tokens=options.tokens,
        packs=options.global_batch,
        packing=options.packing,
        longer=options.longer,
    )
    windows = list(islice(iter(reader), options.windows))
    if len(windows) < options.windows:
        raise ValueError(
            f"--windows is {options.windows}, but the corpus fills only {len(windows)} of "
            f"{options.global_batch} packs of {options.tokens} tokens"
        )
    if "wlb" in options.scheme:
        for window in windows:
            window_steps(window, "wlb", dp_size=dp, pool_size=1, wlb=options.wlb)
    return windows


def settings(options: BenchOptions) -> dict[str, Any]:
    """The options as plain values, for JSON and to tell ranks apart."""
    found: dict[str, Any] = {}
    for name in BenchOptions.__dataclass_fields__:
        value = getattr(options, name)
        if isinstance(value, PoolConfig | WlbConfig):
            value = {key: getattr(value, key) for key in value.__dataclass_fields__}
        found[name] = str(value) if isinstance(value, Path) else value
    return found
