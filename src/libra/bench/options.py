"""Options of `libra bench attention`, their checks, and the windows that they choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import tyro

from libra.baselines.wlb import WlbConfig, pack_by_cost
from libra.config import HeadShape, PoolConfig, check_count
from libra.corpus import Format, read_lengths
from libra.corpus.read import STDIN
from libra.data.packing import LongerCut, Packing, Packs
from libra.plan.plan_pool import cut_pool_heads
from libra.simulate.schemes import MEASURED, SCHEMES, MeasuredKey, Scheme
from libra.simulate.windows import WindowReader

File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Measure Libra and its baselines in turn, under torchrun, on CPUs or GPUs."""

    what: tyro.conf.Positional[Literal["attention"]]
    """One attention layer, forward and backward."""

    lengths: tyro.conf.Positional[str]
    """A corpus: .npy, text, JSONL, Parquet, Arrow, Megatron .idx, or the folder of a Hugging Face
    dataset; every rank reads it.
    """

    scheme: tuple[MeasuredKey, ...] = MEASURED
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
    """`auto` takes a GPU for each rank if there are any, with NCCL; else the CPU, with gloo."""

    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the tensors; by default bfloat16 on a GPU and float32 on a CPU."""

    kernel: str | None = None
    """Attention kernel; the device's best by default."""

    layers: int = 1
    """Timed layers of each microbatch; the median counts.  One more layer runs before them and
    makes the index maps.
    """

    config: PoolConfig = field(default_factory=PoolConfig)
    """Settings of Libra's pools.  A pool_size above the number of replicas is lowered to it."""

    wlb: WlbConfig = field(default_factory=WlbConfig)
    """Limits of the packs that WLB-LLM style packing makes."""

    packing: Packing = "sequential"
    """`sequential` cuts samples at a pack's end, `best-fit` keeps them whole and pads."""

    longer: LongerCut = "drop"
    """Samples longer than a pack: `drop`, `cut` or `refuse` them."""

    format: Format | None = None
    """Format of the corpus, where its name does not show it."""

    column: str | None = None
    """Column or field that holds lengths or tokens."""

    json: File = None
    """Write all results to this file."""

    trace: File = None
    """Write a profile of each scheme's slowest step, one file a rank (`trace.json` becomes
    `trace.rank0.json` ..), for Perfetto (ui.perfetto.dev).
    """

    timeout: float = 300.0
    """Seconds after which a rank that waits for another gives up."""

    seed: int = 0
    """Seed of the random tensors."""

    def head_shape(self, element_bytes: int = 2) -> HeadShape:
        """Heads of the layer."""
        return HeadShape(self.heads, self.kv_heads, self.head_dim, element_bytes)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes, each once."""
        return tuple(SCHEMES[key] for key in dict.fromkeys(self.scheme))


def check_options(options: BenchOptions, world: int) -> None:
    """ValueError for options that no rank of a job of `world` ranks could run."""
    counts = ("tokens", "global_batch", "windows", "cp", "heads", "kv_heads", "head_dim", "layers")
    for name in counts:
        check_count(f"--{name.replace('_', '-')}", getattr(options, name))
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
    # Pools would refuse this as well, but only after the corpus has been read.
    for scheme in options.schemes:
        config = scheme.pool_config(options.config, dp)
        if dp % config.pool_size:
            raise ValueError(
                f"--config.pool-size {config.pool_size} does not divide the {dp} replicas of this "
                "job"
            )
        if scheme.placement != "ring":
            cut_pool_heads(options.head_shape(), config, options.cp)
    for name, path in (("--json", options.json), ("--trace", options.trace)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{name} {path} cannot be written; name a file in a folder there is")


def read_windows(options: BenchOptions) -> list[Packs]:
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
    # Packs by cost may be too full to take all samples: better told before the first scheme runs.
    if any(scheme.packing == "by-cost" for scheme in options.schemes):
        for window in windows:
            pack_by_cost(window.lengths, len(window), window.tokens, options.wlb)
    return windows
