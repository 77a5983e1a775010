"""A study of a corpus on a cluster: what skew costs, what Libra wins, which configuration to take.

    lengths ──> windows ──> imbalance against P ────────────────────────────┐
                   │                                                        ├──> Study, for JSON,
                   └──> replay of every candidate ──> best of them ─────────┤    tables and report
                                                        └──> schemes, scaling, pipelines

The corpus is read twice, and never held whole: once for its workloads, once for the windows to
replay.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libra.config import check_count
from libra.corpus import Format, read_lengths
from libra.cost.memory import rank_memory
from libra.data.lengths import IntArray
from libra.data.packing import LongerCut, Packing, Packs
from libra.simulate.compare import (
    Progress,
    compare_schemes,
    microbatch_times,
    pipeline_results,
    scale_replicas,
    scheme_results,
    worker_loads,
)
from libra.simulate.pooling import pooling_points, summarise_packs
from libra.simulate.predict import Setting
from libra.simulate.recommend import find_warnings, rank_candidates, recommend
from libra.simulate.replay import CandidateReplay, replay
from libra.simulate.results import Candidate, CandidateResult, CorpusSummary, Settings, Study
from libra.simulate.sample import WindowSample, estimate, sample_windows
from libra.simulate.windows import WindowReader

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """How a corpus is read, and how much of it is replayed."""

    packing: Packing = "sequential"
    """`sequential` cuts samples at a pack's end, `best-fit` keeps them whole and pads."""

    longer: LongerCut = "drop"
    """Treatment of samples longer than a pack: `drop`, `cut` or `refuse`."""

    buffer: int | None = None
    """Samples that best-fit packing chooses from."""

    format: Format | None = None
    """Format of the corpus, where its name does not show it."""

    column: str | None = None
    """Column or field that holds lengths, tokens or texts."""

    tokenizer: str | None = None
    """Counts the tokens of texts: a tokenizer.json or a name."""

    windows: int = 32
    """Windows to replay, a stratified sample; 0 for all."""

    compared_windows: int = 16
    """Most of the replayed windows in which all schemes are compared."""

    scale_to: int = 1024
    """Most replicas that throughput is predicted for."""

    memory_cap: float | None = None
    """Most GB of a GPU; by default what its tensors can have."""

    workers: int = 0
    """Processes that replay windows; 0 for one a core."""

    seed: int = 0
    """Seed of all that is drawn at random."""

    def check(self) -> None:
        """Raises ValueError for values that cannot be."""
        least = {"windows": 0, "compared_windows": 1, "scale_to": 1, "workers": 0, "seed": 0}
        for name, value in least.items():
            check_count(name, getattr(self, name), least=value)
        if self.windows == 1:
            raise ValueError("windows is 1; a sample has at least 2 (0 for all)")
        cap = self.memory_cap
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"memory_cap is {cap}; it must be a number of GB > 0")
        if self.buffer is not None and self.packing != "best-fit":
            raise ValueError(f"buffer={self.buffer} is for packing='best-fit' only")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """The question: a corpus, a cluster, and the candidates to compare."""

    source: str
    """A corpus as `read_lengths` takes it."""
    options: StudyOptions
    setting: Setting
    """Model, cluster, parallelism, and the settings that all candidates share."""
    candidates: Sequence[Candidate]
    journal: Path | None = None
    """File that keeps what is replayed; see `replay`."""

    @property
    def cap(self) -> float:
        """Most bytes of a GPU."""
        cap = self.options.memory_cap
        return self.setting.time.cluster.tensor_bytes if cap is None else cap * 1e9


def run_study(config: StudyConfig, progress: Progress) -> Study:
    """Read the corpus, replay the candidates, compare the schemes, recommend a candidate.

    Raises ValueError for what `read_lengths`, `WindowReader`, `replay` and the cost model refuse.
    """
    options = config.options
    # Step 1: read the whole corpus for its counts and the workload of every pack.
    corpus, workloads = _survey(config, progress)

    # Step 2: replay every candidate on a sample of the windows; keep the few windows to compare in.
    sample = _sample(config, workloads)
    compared = _spread_over(sample.windows, options.compared_windows)
    kept: list[Packs] = []
    replays = replay(
        _keeping(_reader(config), compared, kept),
        config.candidates,
        config.setting,
        sample,
        workers=options.workers or os.cpu_count() or 1,
        journal=config.journal,
        progress=lambda done, total: progress("replaying candidates", done, total),
    )
    candidates = tuple(_candidate_result(config, each, sample) for each in replays)

    # Step 3: compare the schemes, with the best candidate as Libra's configuration.
    ranked = rank_candidates(candidates)
    best = replays[ranked[0]]
    setting = _with_candidate(config.setting, best.candidate)
    libra = [
        each.seconds(best.candidate.pool_size) for each in best.windows if each.window in compared
    ]
    schemes = compare_schemes(kept, libra, setting, progress)
    results = scheme_results(schemes, setting)
    first = {key: windows[0] for key, windows in schemes.items()}
    scaling = scale_replicas(
        kept[0], first, setting, progress, most=options.scale_to, seed=options.seed
    )
    corpus = replace(
        corpus,
        source=config.source,
        windows_replayed=len(sample.windows),
        windows_compared=len(compared),
    )
    return Study(
        corpus=corpus,
        settings=_settings(config),
        packs=summarise_packs(workloads, corpus, setting.parallelism.tokens),
        pooling=pooling_points(workloads, seed=options.seed),
        candidates=candidates,
        recommendation=recommend(
            candidates, ranked, results, config=setting.config, cap=config.cap
        ),
        schemes=results,
        scaling=scaling,
        workers=worker_loads(kept[0], setting),
        microbatches=microbatch_times(schemes, setting),
        pipeline=pipeline_results(schemes, setting),
        warnings=find_warnings(corpus, workloads, setting),
    )


def _settings(config: StudyConfig) -> Settings:
    setting = config.setting
    return Settings(
        model=setting.model,
        parameters=setting.model.parameters,
        cluster=setting.time.cluster,
        parallelism=setting.parallelism,
        packing=config.options.packing,
        longer=config.options.longer,
        placement=setting.config.placement,
        chunks=setting.config.chunks,
        tolerance=setting.config.tolerance,
        memory_cap_bytes=config.cap,
        kernel_table=setting.time.table.source,
    )


def _with_candidate(setting: Setting, candidate: Candidate) -> Setting:
    return replace(setting, config=candidate.config(setting.config))


def _reader(config: StudyConfig) -> WindowReader:
    options = config.options
    lengths = read_lengths(
        config.source, format=options.format, column=options.column, tokenizer=options.tokenizer
    )
    return WindowReader(
        lengths,
        tokens=config.setting.parallelism.tokens,
        packs=config.setting.parallelism.global_batch,
        packing=options.packing,
        longer=options.longer,
        buffer=options.buffer,
    )


def _survey(config: StudyConfig, progress: Progress) -> tuple[CorpusSummary, FloatArray]:
    """Read the whole corpus: its counts, and the packs' workloads of every window, [windows, GBS].

    In float64, exact below 2^53: enough for statistics.
    """
    reader = _reader(config)
    rows = []
    for packs in reader:
        rows.append(packs.workloads.astype(np.float64))
        progress("reading the corpus", len(rows), None)
    return reader.summary, np.array(rows)


def _sample(config: StudyConfig, workloads: FloatArray) -> WindowSample:
    """Windows to replay, in strata by how much their heaviest pack outweighs the mean."""
    skew = workloads.max(axis=1) / np.maximum(workloads.mean(axis=1), 1.0)
    return sample_windows(skew, config.options.windows or len(skew), seed=config.options.seed)


def _spread_over(windows: IntArray, count: int) -> list[int]:
    """`count` of the windows, or all there are, evenly spread."""
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return list(map(int, windows[chosen]))


def _keeping(windows: Iterable[Packs], wanted: Sequence[int], kept: list[Packs]) -> Iterator[Packs]:
    """All windows as they come; those of the `wanted` numbers are added to `kept`, so that the
    corpus need not be read a third time.
    """
    for number, packs in enumerate(windows):
        if number in wanted:
            kept.append(packs)
        yield packs


def _candidate_result(
    config: StudyConfig, found: CandidateReplay, sample: WindowSample
) -> CandidateResult:
    """Means and worst values of a candidate's figures, and the step and memory they make."""
    candidate, estimates = found.candidate, found.estimates
    setting = _with_candidate(config.setting, candidate)
    spread = setting.parallelism
    # Step 1: the optimizer step, and the share of attention that is not computed, per window.
    windows = [each.seconds(candidate.pool_size) for each in found.windows]
    step = estimate(np.array([each.step(setting).seconds for each in windows]), sample)
    # Step 2: the memory of the worst window.
    kept, workspace = estimates["kept_bytes"].most, estimates["workspace_bytes"].most
    memory = rank_memory(setting.model, spread, fetched=kept, workspace=workspace).total
    fits = memory <= config.cap
    # Step 3: every figure in the units of the report.
    giga = 1e9
    return CandidateResult(
        **asdict(candidate),
        before=estimates["pools_before"].mean,
        after=estimates["pools_after"].mean,
        intra_mean=estimates["workers_after"].mean,
        intra_worst=estimates["workers_after"].most,
        gigabytes=estimates["moved_bytes"].mean / giga,
        between_nodes_gigabytes=estimates["across_bytes"].mean / giga,
        sent_worst_gigabytes=estimates["worst_sent"].most / giga,
        received_worst_gigabytes=estimates["worst_received"].most / giga,
        extra_memory_gigabytes=(kept + workspace) / giga,
        tiles=estimates["tiles"].mean,
        plan_milliseconds=estimates["planning_seconds"].mean * 1e3,
        step_seconds=step.mean,
        step_low=step.low,
        step_high=step.high,
        tokens_per_second=spread.global_batch * spread.tokens / step.mean,
        exposed_share=float(np.mean([each.exposed_share for each in windows])),
        memory_gigabytes=memory / giga,
        fits=fits,
        problem=None if fits else "needs more memory than a GPU has",
        estimates=estimates,
    )
