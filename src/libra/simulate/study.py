"""A study of a corpus on a cluster: what skew costs, what Libra wins, which configuration to take.

    lengths ──> windows ──> imbalance against P ────────────────────────────┐
                   │                                                        ├──> Study, for JSON,
                   └──> replay of every candidate ──> best of them ─────────┤    tables and report
                                                        └──> schemes, scaling, pipelines

The corpus is read twice, and never held whole: once for its workloads, once for the windows to
replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libra.config import PoolConfig
from libra.corpus import Format, read_lengths
from libra.cost.attention_time import AttentionTime
from libra.cost.hardware import Cluster
from libra.cost.kernel_table import KernelTable
from libra.cost.memory import rank_memory
from libra.cost.models import Model
from libra.cost.parallelism import Parallelism
from libra.data.packing import LongerCut, Packs
from libra.simulate.compare import (
    Progress,
    compare_schemes,
    microbatch_times,
    pipeline_results,
    scheme_results,
    worker_loads,
)
from libra.simulate.figures import Candidate, CandidateFigures
from libra.simulate.pooling import pooling_points
from libra.simulate.predict import SchemeFigures, Setting
from libra.simulate.recommend import rank_candidates, recommend
from libra.simulate.replay import replay
from libra.simulate.results import CandidateResult, Settings, Study
from libra.simulate.sample import WindowSample, estimate, sample_windows
from libra.simulate.scaling import scale_replicas
from libra.simulate.survey import find_warnings, summarise_corpus, summarise_packs
from libra.simulate.windows import CorpusCounts, Packing, WindowReader

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """The question: a corpus, a cluster, and the candidates to compare."""

    source: str
    """A corpus as `read_lengths` takes it."""
    model: Model
    cluster: Cluster
    parallelism: Parallelism
    table: KernelTable
    candidates: Sequence[Candidate]
    config: PoolConfig = field(default_factory=PoolConfig)
    """Settings that all candidates share."""
    format: Format | None = None
    column: str | None = None
    tokenizer: str | None = None
    packing: Packing = "sequential"
    longer: LongerCut = "drop"
    buffer: int | None = None
    windows: int | None = 32
    """Windows to replay, chosen by strata of skew; None for all."""
    compared_windows: int = 3
    """Windows in which all schemes are compared."""
    scale_to: int = 1024
    """Most replicas that throughput is predicted for."""
    memory_cap: float | None = None
    """Most bytes of a GPU; None for what the cluster's have for tensors."""
    workers: int = 1
    journal: Path | None = None
    seed: int = 0

    @property
    def cap(self) -> float:
        """Most bytes of a GPU."""
        return self.cluster.tensor_bytes if self.memory_cap is None else self.memory_cap

    @property
    def time(self) -> AttentionTime:
        """Times plans on the cluster."""
        return AttentionTime(cluster=self.cluster, table=self.table, tp=self.parallelism.tp)

    def setting(self, candidate: Candidate) -> Setting:
        """What all schemes share, with this candidate as Libra's configuration."""
        return Setting(
            model=self.model,
            parallelism=self.parallelism,
            time=self.time,
            config=self.config.replace(
                pool_size=candidate.pool_size,
                block_size=candidate.block_size,
                head_shards=candidate.head_shards,
            ),
        )


def run_study(config: StudyConfig, progress: Progress) -> Study:
    """Read the corpus, replay the candidates, compare the schemes, recommend a candidate.

    Raises ValueError for what `read_lengths`, `WindowReader`, `replay` and the cost model refuse.
    """
    # Step 1: read the whole corpus for its counts and the workload of every pack.
    counts, workloads = _survey(config, progress)

    # Step 2: replay every candidate on a sample of the windows; keep the few windows to compare in.
    sample = _sample(config, workloads)
    compared: list[Packs] = []
    windows = _keeping(_reader(config), _compared_windows(config, sample), compared)
    figures = _replay(config, sample, windows, progress)
    candidates = tuple(_candidate_result(config, each, sample) for each in figures)

    # Step 3: compare the schemes, with the best candidate as Libra's configuration.
    ranked = rank_candidates(candidates)
    setting = config.setting(figures[ranked[0]].candidate)
    schemes = compare_schemes(compared, setting, progress)
    results = scheme_results(schemes, setting)
    first = {key: windows[0] for key, windows in schemes.items()}
    scaling = scale_replicas(
        compared[0], first, setting, progress, most=config.scale_to, seed=config.seed
    )
    return Study(
        corpus=summarise_corpus(config.source, counts, replayed=len(sample.windows)),
        settings=_settings(config),
        packs=summarise_packs(workloads, counts, config.parallelism.tokens),
        pooling=pooling_points(workloads, seed=config.seed),
        candidates=candidates,
        recommendation=recommend(candidates, ranked, results, config=config.config, cap=config.cap),
        schemes=results,
        scaling=scaling,
        workers=worker_loads(compared[0], setting),
        microbatches=microbatch_times(schemes, setting),
        pipeline=pipeline_results(schemes, setting),
        warnings=find_warnings(counts, workloads, setting),
    )


def _settings(config: StudyConfig) -> Settings:
    return Settings(
        model=config.model,
        parameters=config.model.parameters,
        cluster=config.cluster,
        parallelism=config.parallelism,
        packing=config.packing,
        longer=config.longer,
        placement=config.config.placement,
        chunks=config.config.chunks,
        tolerance=config.config.tolerance,
        memory_cap_bytes=config.cap,
        kernel_table=config.table.source,
    )


def _reader(config: StudyConfig) -> WindowReader:
    return WindowReader(
        _chunks(config),
        tokens=config.parallelism.tokens,
        packs=config.parallelism.global_batch,
        packing=config.packing,
        longer=config.longer,
        buffer=config.buffer,
    )


def _chunks(config: StudyConfig) -> Iterable[IntArray]:
    return read_lengths(
        config.source, format=config.format, column=config.column, tokenizer=config.tokenizer
    )


def _survey(config: StudyConfig, progress: Progress) -> tuple[CorpusCounts, FloatArray]:
    """Read the whole corpus: its counts, and the packs' workloads of every window, [windows, GBS].

    In float64, exact below 2^53: enough for statistics.
    """
    reader = _reader(config)
    rows = []
    for packs in reader:
        rows.append(packs.workloads.astype(np.float64))
        progress("reading the corpus", len(rows), None)
    return reader.counts, np.array(rows)


def _sample(config: StudyConfig, workloads: FloatArray) -> WindowSample:
    """Windows to replay, in strata by how much their heaviest pack outweighs the mean."""
    skew = workloads.max(axis=1) / np.maximum(workloads.mean(axis=1), 1.0)
    wanted = len(workloads) if config.windows is None else config.windows
    return sample_windows(skew, wanted, seed=config.seed)


def _compared_windows(config: StudyConfig, sample: WindowSample) -> IntArray:
    """Numbers of the windows in which schemes are compared, spread over those that are replayed."""
    last = len(sample.windows) - 1
    count = min(config.compared_windows, len(sample.windows))
    chosen: IntArray = sample.windows[np.linspace(0, last, count).round().astype(int)]
    return chosen


def _keeping(windows: Iterable[Packs], wanted: IntArray, kept: list[Packs]) -> Iterator[Packs]:
    """All windows as they come; those of the `wanted` numbers are kept, so that none is read
    again.
    """
    for number, packs in enumerate(windows):
        if number in wanted:
            kept.append(packs)
        yield packs


def _replay(
    config: StudyConfig, sample: WindowSample, windows: Iterable[Packs], progress: Progress
) -> list[CandidateFigures]:
    parallelism = config.parallelism
    return replay(
        windows,
        config.candidates,
        cp_size=parallelism.cp,
        heads=config.model.heads(tp=parallelism.tp),
        config=config.config,
        dp_size=parallelism.dp,
        sample=sample,
        measure=config.time,
        workers=config.workers,
        journal=config.journal,
        progress=lambda done, total: progress("replaying candidates", done, total),
    )


def _candidate_result(
    config: StudyConfig, figures: CandidateFigures, sample: WindowSample
) -> CandidateResult:
    """Means and worst values of a candidate's figures, and the step and memory they make."""
    setting = config.setting(figures.candidate)
    spread = config.parallelism
    steps, exposed = [], []
    for window in figures.windows:
        pools = window.pools
        found = SchemeFigures(
            forward=pools["forward_seconds"],
            backward=pools["backward_seconds"],
            compute=pools["compute_seconds"],
            linear=np.ones(len(pools["load"])),
            pool_size=figures.candidate.pool_size,
        )
        steps.append(found.step(setting).seconds)
        spent = found.forward.sum() + found.backward.sum()
        exposed.append(1 - found.compute.sum() / spent if spent else 0.0)
    step = estimate(np.array(steps), sample)
    kept, workspace = figures["kept_bytes"].most, figures["workspace_bytes"].most
    memory = rank_memory(config.model, spread, fetched=kept, workspace=workspace).total
    fits = memory <= config.cap
    giga = 1e9
    return CandidateResult(
        pool_size=figures.candidate.pool_size,
        block_size=figures.candidate.block_size,
        head_shards=figures.candidate.head_shards,
        before=figures["pools_before"].mean,
        after=figures["pools_after"].mean,
        intra_mean=figures["workers_after"].mean,
        intra_worst=figures["workers_after"].most,
        gigabytes=figures["moved_bytes"].mean / giga,
        between_nodes_gigabytes=figures["across_bytes"].mean / giga,
        sent_worst_gigabytes=figures["worst_sent"].most / giga,
        received_worst_gigabytes=figures["worst_received"].most / giga,
        extra_memory_gigabytes=(kept + workspace) / giga,
        tiles=figures["tiles"].mean,
        plan_milliseconds=figures["planning_seconds"].mean * 1e3,
        step_seconds=step.mean,
        step_low=step.low,
        step_high=step.high,
        tokens_per_second=spread.global_batch * spread.tokens / step.mean,
        exposed_share=float(np.mean(exposed)),
        memory_gigabytes=memory / giga,
        fits=fits,
        problem=None if fits else "needs more memory than a GPU has",
        estimates=figures.estimates,
    )
