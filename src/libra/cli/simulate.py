"""`libra simulate`: choose a configuration from a corpus's lengths before renting the GPUs."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import tyro
from rich.console import Console

from libra.cli.console import check_outputs, table_console, writing
from libra.cli.simulate_progress import stage_progress
from libra.cli.simulate_table import print_study
from libra.config import HeadShape, PoolConfig
from libra.corpus import load_lengths
from libra.corpus.read import STDIN
from libra.cost.attention_time import AttentionTime
from libra.cost.description import describe
from libra.cost.fields import find_preset
from libra.cost.models import MODELS, Model
from libra.cost.parallelism import Parallelism, Recompute
from libra.cost.published import cluster_table
from libra.extras import check_installed
from libra.simulate.predict import Setting
from libra.simulate.replay import check_candidates
from libra.simulate.report import PACKAGES
from libra.simulate.results import Candidate, Study, study_json
from libra.simulate.study import StudyConfig, StudyOptions, run_study

File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Sizes = Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")]
_PIPE_COLUMNS: Final = 140
_UNSHOWN: Final = ("lengths", "study", "config", "json", "html", "plots", "journal", "workers")
"""Options that a command line shows otherwise, or that change no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Replay a corpus on a model of a cluster; recommend a configuration."""

    lengths: tyro.conf.Positional[str]
    """A corpus: .npy, text, JSONL, Parquet, Arrow, Megatron .idx, the folder of a Hugging Face
    dataset, or - for standard input.
    """

    cluster: str = "h100"
    """A preset (a100, h100, h200, b200), or a TOML file with a [cluster] section.  Its [model] and
    [parallelism] sections take the place of the options below.
    """

    model: str = "qwen3-8b"
    """A preset: qwen3-30b-a3b, qwen3-8b, llama-3-8b or llama-3-70b."""

    tokens: int = 262_144
    """L: tokens of a pack."""

    global_batch: int = 128
    """Packs of one optimizer step."""

    dp: int = 16
    """Data-parallel replicas."""

    cp: int = 8
    """Context-parallel ranks of a replica."""

    tp: int = 2
    """Tensor-parallel ranks."""

    pp: int = 1
    """Pipeline stages."""

    ep: int = 1
    """Expert-parallel ranks."""

    recompute: Recompute = "full"
    """What the backward pass computes again: all layers (`full`), or `none`."""

    pool_sizes: Sizes = ()
    """P to try; by default the powers of two from 2 that divide dp."""

    block_sizes: Sizes = ()
    """B to try; by default 4096, and for placement `paper` also 2048, 8192 and 16384."""

    head_shards: Sizes = ()
    """H to try; by default 1, and for placement `paper` also 2 and 4."""

    config: PoolConfig = field(default_factory=PoolConfig)
    """Settings that all candidates share.  The cluster and tp set ranks_per_node, unless it is
    given.
    """

    kernels: File = None
    """A table that `libra calibrate` wrote; by default published figures for the GPU."""

    study: tyro.conf.OmitArgPrefixes[StudyOptions] = field(default_factory=StudyOptions)

    journal: File = None
    """Keep the replayed windows in this file; a run that was interrupted continues from it."""

    json: File = None
    """Write everything to this file."""

    html: File = None
    """Write a report to this file.  It works without a network.  Needs the extra `report`."""

    plots: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write the charts of the report into this folder, as SVG and PNG.  Needs the extra `report`.
    """


def run_simulate(options: SimulateOptions, console: Console | None = None) -> int:
    """Simulate, print and write; returns the exit code.

    Raises ValueError for options and files that cannot be used.
    """
    # Step 1: everything that may be wrong is refused before the corpus is read.
    config = make_study(options)
    _check_outputs(options)
    # Step 2: the study.
    console = console or table_console(_PIPE_COLUMNS)
    with _readable_twice(config) as readable, stage_progress(console) as progress:
        study = run_study(readable, progress)
    study = replace(
        study,
        created=date.today().isoformat(),
        command=_command(options),
        corpus=replace(study.corpus, source=config.source),
    )
    # Step 3: print it, then write the files.
    print_study(study, console)
    _write(options, study)
    written = {"figures": options.json, "report": options.html, "plots": options.plots}
    for what, path in written.items():
        if path is not None:
            console.print(f"{what:<8} {path}", highlight=False, markup=False)
    return 0


@contextmanager
def _readable_twice(config: StudyConfig) -> Iterator[StudyConfig]:
    """The study's configuration, with standard input copied to a file for as long as it runs."""
    if config.source != STDIN:
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "lengths.npy"
        how = config.options
        lengths = load_lengths(STDIN, format=how.format, column=how.column, tokenizer=how.tokenizer)
        np.save(kept, lengths)
        plain = replace(how, format=None, column=None, tokenizer=None)
        yield replace(config, source=str(kept), options=plain)


def make_study(options: SimulateOptions) -> StudyConfig:
    """The study that the options ask for.  Raises ValueError."""
    # Step 1: the machine, the model and how it is spread; sections of a file come before options.
    described = describe(options.cluster)
    cluster = described.cluster
    model: Model = described.model or find_preset("model", options.model, MODELS)
    spread = described.parallelism or Parallelism(
        dp=options.dp,
        cp=options.cp,
        global_batch=options.global_batch,
        tokens=options.tokens,
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        recompute=options.recompute,
    )
    spread.chunk_layers(model)  # refuses what cannot be spread so, before a corpus is read
    options.study.check()
    if options.config.placement == "ulysses":
        raise ValueError("placement='ulysses' has no pools to choose; it is compared anyway")
    # Step 2: the candidates, and the setting that they share.
    heads = model.heads(tp=spread.tp)
    candidates = _candidates(options, spread.dp, heads)
    table = cluster_table(cluster, heads, options.kernels)
    config = cluster.with_nodes(options.config, tp=spread.tp)
    setting = Setting(
        model=model,
        parallelism=spread,
        time=AttentionTime(cluster=cluster, table=table, tp=spread.tp),
        config=config.replace(pool_size=candidates[0].pool_size),
    )
    check_candidates(candidates, setting)  # now, not after the corpus was read
    return StudyConfig(
        source=options.lengths,
        options=options.study,
        setting=setting,
        candidates=candidates,
        journal=options.journal,
    )


def _candidates(options: SimulateOptions, dp: int, heads: HeadShape) -> list[Candidate]:
    """All combinations of P, B and H, each once."""
    paper = options.config.placement == "paper"
    powers = [1 << i for i in range(1, dp.bit_length()) if dp % (1 << i) == 0]
    sizes = options.pool_sizes or powers or [1]
    blocks = options.block_sizes or ((2048, 4096, 8192, 16384) if paper else (4096,))
    # A chunk holds whole query heads of every shard.
    chunks, usual = options.config.chunks, (1, 2, 4) if paper else (1,)
    shards = options.head_shards or [h for h in usual if heads.q % (h * chunks) == 0] or [1]
    return [Candidate(*each) for each in dict.fromkeys(product(sizes, blocks, shards))]


def _check_outputs(options: SimulateOptions) -> None:
    """ValueError for what cannot be written, before hours of work."""
    files = {f"--{name}": getattr(options, name) for name in ("json", "html", "journal")}
    check_outputs(files, corpus=options.lengths)
    if options.plots is not None and options.plots.exists() and not options.plots.is_dir():
        raise ValueError(f"--plots {options.plots} is a file; name a folder")
    for name, packages in (("html", PACKAGES), ("plots", ("altair", "vl_convert"))):
        for package in packages if getattr(options, name) is not None else ():
            check_installed(package, f"--{name}")


def _write(options: SimulateOptions, study: Study) -> None:
    """Write what was asked for."""
    if options.json is not None:
        with writing("--json", options.json):
            options.json.write_text(json.dumps(study_json(study), indent=1), encoding="utf-8")
    if options.html is not None:
        from libra.simulate.report import write_report

        with writing("--html", options.html):
            write_report(study, options.html)
    if options.plots is not None:
        from libra.simulate.charts import write_plots

        with writing("--plots", options.plots):
            write_plots(study, options.plots)


def _command(options: SimulateOptions) -> str:
    """The command line that asks for the same figures: everything that is not as by default."""
    default = SimulateOptions(lengths="")
    words = ["libra", "simulate", options.lengths]
    for prefix, chosen, usual in (
        ("", options, default),
        ("", options.study, default.study),
        ("config.", options.config, default.config),
    ):
        for each in fields(chosen):
            value = getattr(chosen, each.name)
            if each.name in _UNSHOWN or value == getattr(usual, each.name):
                continue
            words.append(f"--{prefix}{each.name.replace('_', '-')}")
            words += map(str, value if isinstance(value, tuple) else (value,))
    return shlex.join(words)
