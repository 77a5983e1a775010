"""A study of a corpus on a cluster: what skew costs, what Libra wins, which configuration to take.

    lengths ──> windows ──> imbalance against P ─────────────────────────┐
                   │                                                     ├──> one dict, for JSON,
                   └──> replay of every candidate ──> recommendation ──> │    tables and the report
                                                         └──> schemes, scaling, pipelines ──┘

The corpus is read twice, and never held whole: once for its workloads, once for the windows to
replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

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
    pipeline_rows,
    scaling_rows,
    scheme_rows,
    worker_loads,
)
from libra.simulate.figures import Candidate, CandidateFigures
from libra.simulate.recommend import Verdict, recommend
from libra.simulate.replay import replay
from libra.simulate.sample import WindowSample, estimate, sample_windows
from libra.simulate.schemes import SchemeFigures, Setting
from libra.simulate.sections import (
    candidate_row,
    describe_advice,
    describe_corpus,
    describe_packs,
    describe_settings,
    find_warnings,
    pooling_rows,
)
from libra.simulate.windows import CorpusCounts, Packing, WindowReader

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What to find out."""

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


def run_study(study: Study, progress: Progress) -> dict[str, Any]:
    """All of it, as plain numbers and lists.

    Raises ValueError for what `read_lengths`, `WindowReader`, `replay` and the cost model refuse.
    """
    counts, workloads = _survey(study, progress)
    sample = _sample(study, workloads)
    compared: list[Packs] = []
    windows = _keeping(_reader(study), _compared_windows(study, sample), compared)
    figures = _replay(study, sample, windows, progress)
    verdicts = [_verdict(study, each, sample) for each in figures]
    advice = recommend(verdicts, study.config, study.cap)
    setting = study.setting(verdicts[advice.ranked[0]].candidate)
    schemes = compare_schemes(compared, setting, progress)
    rows = scheme_rows(schemes, setting)
    return {
        "version": VERSION,
        "corpus": describe_corpus(study, counts, len(workloads), len(sample.windows)),
        "settings": describe_settings(study),
        "packs": describe_packs(workloads, counts, study.parallelism.tokens),
        "pooling": pooling_rows(workloads, seed=study.seed),
        "candidates": [
            candidate_row(verdict, each) for verdict, each in zip(verdicts, figures, strict=True)
        ],
        "recommendation": describe_advice(advice, rows),
        "schemes": rows,
        "scaling": scaling_rows(
            compared[0],
            {key: found[0] for key, found in schemes.items()},
            setting,
            progress,
            most=study.scale_to,
            seed=study.seed,
        ),
        "workers": worker_loads(compared[0], setting),
        "microbatches": microbatch_times(schemes, setting),
        "pipeline": pipeline_rows(schemes, setting),
        "warnings": find_warnings(study, counts, workloads, setting),
    }


def _reader(study: Study) -> WindowReader:
    return WindowReader(
        _chunks(study),
        tokens=study.parallelism.tokens,
        packs=study.parallelism.global_batch,
        packing=study.packing,
        longer=study.longer,
        buffer=study.buffer,
    )


def _chunks(study: Study) -> Iterable[IntArray]:
    return read_lengths(
        study.source, format=study.format, column=study.column, tokenizer=study.tokenizer
    )


def _survey(study: Study, progress: Progress) -> tuple[CorpusCounts, FloatArray]:
    """Read the whole corpus: its counts, and the packs' workloads of every window, [windows, GBS].

    In float64, exact below 2^53: enough for statistics.
    """
    reader = _reader(study)
    rows = []
    for packs in reader:
        rows.append(packs.workloads.astype(np.float64))
        progress("reading the corpus", len(rows), None)
    return reader.counts, np.array(rows)


def _sample(study: Study, workloads: FloatArray) -> WindowSample:
    """Windows to replay, in strata by how much their heaviest pack outweighs the mean."""
    skew = workloads.max(axis=1) / np.maximum(workloads.mean(axis=1), 1.0)
    wanted = len(workloads) if study.windows is None else study.windows
    return sample_windows(skew, wanted, seed=study.seed)


def _compared_windows(study: Study, sample: WindowSample) -> IntArray:
    """Numbers of the windows in which schemes are compared, spread over those that are replayed."""
    last = len(sample.windows) - 1
    count = min(study.compared_windows, len(sample.windows))
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
    study: Study, sample: WindowSample, windows: Iterable[Packs], progress: Progress
) -> list[CandidateFigures]:
    parallelism = study.parallelism
    return replay(
        windows,
        study.candidates,
        cp_size=parallelism.cp,
        heads=study.model.heads(tp=parallelism.tp),
        config=study.config,
        dp_size=parallelism.dp,
        sample=sample,
        measure=study.time,
        workers=study.workers,
        journal=study.journal,
        progress=lambda done, total: progress("replaying candidates", done, total),
    )


def _verdict(study: Study, figures: CandidateFigures, sample: WindowSample) -> Verdict:
    setting = study.setting(figures.candidate)
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
    memory = rank_memory(
        study.model,
        study.parallelism,
        fetched=figures["kept_bytes"].most,
        workspace=figures["workspace_bytes"].most,
    ).total
    return Verdict(
        candidate=figures.candidate,
        step_seconds=step,
        tokens_per_second=study.parallelism.global_batch * study.parallelism.tokens / step.mean,
        exposed_share=float(np.mean(exposed)),
        memory_bytes=memory,
        fits=memory <= study.cap,
    )
