"""The result of a study: one tree of frozen parts, from which tables, report and JSON are made.

    Study
      corpus           CorpusSummary       samples, tokens, windows, histogram of lengths
      settings         Settings            model, cluster, parallelism and shared pool settings
      packs            PackSummary         how unequal the packs are
      pooling          PoolingPoint ...    imbalance between pools, one for each pool size
      candidates       CandidateResult ... one for each (P, B, H)
      recommendation   Recommendation      the candidate to take
      schemes          SchemeResult ...    one for each way to balance attention
      scaling          Scaling             throughput against the number of replicas
      workers          WorkerLoads         the loads inside one pool
      microbatches     MicrobatchTimes     histogram of attention seconds
      pipeline         PipelineResult ...  idle shares of pipeline schedules
      warnings         str ...

Every number is a Python int or float, so `study_json` needs no conversion but of NaN.  An imbalance
is the largest value over the mean, minus 1: 0 is perfect balance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra.config import Placement, PoolConfig
from libra.cost.hardware import Cluster
from libra.cost.models import Model
from libra.cost.parallelism import Parallelism
from libra.cost.pipeline import ScheduleName
from libra.data.packing import LongerCut, Packing
from libra.simulate.sample import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBins:
    """A histogram of sample lengths, from the first bin that holds a sample to the last."""

    edges: tuple[int, ...]
    """First length of each bin in tokens, then the first length past the last bin; [bins + 1]."""
    samples: tuple[int, ...]
    """Samples of each bin, [bins]."""
    tokens: tuple[int, ...]
    """Tokens of those samples, [bins]."""
    squares: tuple[float, ...]
    """Sum of their squared lengths, which is their attention cost, [bins]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """Samples and tokens of the corpus, and how many of them the windows use.

    tokens = those in windows + dropped_tokens + left_over_tokens.
    """

    source: str = ""
    """The corpus as it was named."""
    samples: int
    """Samples of the corpus, dropped ones included."""
    tokens: int
    """Tokens of those samples."""
    median: float
    """Median length of a sample in tokens, to the width of a histogram bin."""
    mean: float
    """Mean length of a sample in tokens."""
    longest: int
    """Length of the longest sample in tokens."""
    dropped_samples: int
    """Samples left out because they are longer than a pack."""
    dropped_tokens: int
    """Tokens of the dropped samples."""
    cut_samples: int
    """Samples longer than a pack that were cut into pieces."""
    padding_tokens: int
    """Padding in the packs of all windows."""
    left_over_tokens: int
    """Tokens at the end of the corpus that fill no window."""
    windows: int
    """Windows of the corpus; one window is the packs of one optimizer step."""
    windows_replayed: int = 0
    """Windows that were replayed for the candidates."""
    windows_compared: int = 0
    """Windows in which the schemes were compared; means over these."""
    histogram: LengthBins
    """Lengths of all samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that was chosen and holds for all candidates."""

    model: Model
    parameters: int
    """Parameters of the model."""
    cluster: Cluster
    parallelism: Parallelism
    packing: Packing
    """How samples become packs."""
    longer: LongerCut
    """Treatment of samples longer than a pack."""
    placement: Placement
    """Placement of tiles inside a pool."""
    chunks: int
    """M: head pieces whose transfer and computation overlap."""
    tolerance: float
    """tau: how far above the mean load a worker may be planned, 0.03 for 3%."""
    memory_cap_bytes: float
    """Most bytes of one GPU that training may use."""
    kernel_table: str
    """Source of the attention kernel's speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """How unequal the packs are in workload, the sum of squared sample lengths."""

    quantiles: tuple[float, ...]
    """Workload of a pack over the mean pack's at 0%, 1%, ... 100% of all packs, [101]."""
    cv: float
    """Coefficient of variation: standard deviation of the workloads over their mean."""
    heaviest: float
    """Heaviest pack of a window over the window's mean pack; mean over the windows."""
    padding_share: float
    """Share of the packs' tokens that is padding, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingPoint:
    """Imbalance between the pools of a window at one pool size; means over windows."""

    pool_size: int
    """P: packs (data-parallel replicas) of one pool."""
    before: float
    """Packs grouped in sampler order."""
    after_greedy: float
    """Packs grouped by VRSP as in the paper."""
    after: float
    """Packs grouped by VRSP, then refined by swaps, as the sampler does."""
    random: float
    """Packs of the whole corpus grouped at random."""
    theory: float
    """Expected by the law of large numbers from `PackSummary.cv`."""
    bound: float
    """Least imbalance that any grouping of whole packs could reach."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice of the settings that a replay compares."""

    pool_size: int
    """P: data-parallel replicas of a pool."""
    block_size: int
    """B: most query tokens of a tile."""
    head_shards: int
    """H: head shards of a block."""

    def __str__(self) -> str:
        return f"P={self.pool_size} B={self.block_size} H={self.head_shards}"

    def config(self, shared: PoolConfig) -> PoolConfig:
        """The whole configuration, where `shared` has the other settings."""
        return shared.replace(
            pool_size=self.pool_size, block_size=self.block_size, head_shards=self.head_shards
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateResult(Candidate):
    """One candidate (P, B, H) on the replayed windows.

    Bytes are of one pool and one layer's forward; a mean is over windows and pools, "worst" the
    largest value seen in any pool.
    """

    before: float
    """Imbalance between pools grouped in sampler order, mean."""
    after: float
    """Imbalance between pools after VRSP and refinement, mean."""
    intra_mean: float
    """Imbalance between the workers of a pool as planned, mean."""
    intra_worst: float
    """The same, worst."""
    gigabytes: float
    """GB that leave a worker, summed over the pool, mean."""
    between_nodes_gigabytes: float
    """GB of those that leave a node, mean."""
    sent_worst_gigabytes: float
    """GB sent by the worker that sends most, worst."""
    received_worst_gigabytes: float
    """GB received by the worker that receives most, worst."""
    extra_memory_gigabytes: float
    """GB that one worker holds for others, or of others, and as workspace of one call, worst."""
    tiles: float
    """Tiles of a pool's plan, mean."""
    plan_milliseconds: float
    """Milliseconds to plan a pool on one core, mean."""
    step_seconds: float
    """Predicted seconds of an optimizer step, mean."""
    step_low: float
    """Lower end of the 95% confidence interval of `step_seconds`."""
    step_high: float
    """Upper end of the same interval."""
    tokens_per_second: float
    """Predicted throughput of the whole cluster."""
    exposed_share: float
    """Share of the attention time that the busiest worker of a pool does not compute, in [0, 1]."""
    memory_gigabytes: float
    """GB that a GPU needs at the worst moment of the worst window."""
    fits: bool
    """Whether that is at most the memory cap."""
    problem: str | None
    """Why the candidate cannot be used; None where it can."""
    estimates: Mapping[str, Estimate]
    """Every figure of the replay by its name: fields of `WindowReplay`, `PoolReplay` and
    `AttentionCost`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailing:
    """A candidate behind the recommended one."""

    candidate: int
    """Index into `Study.candidates`."""
    behind: float
    """How much longer its step takes than the first one's, 0.01 for 1%; negative if shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Which candidate to take."""

    candidate: int | None
    """Index into `Study.candidates`; None where none fits the memory cap."""
    line: str | None
    """The `libra.PoolConfig(...)` to paste; None where none fits."""
    text: str
    """The recommendation in words."""
    trailing: tuple[Trailing, ...]
    """All others, the best first, those that fit before those that do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeResult:
    """One way to balance attention on the compared windows; all values are means over them.

    step_seconds = attention_seconds + exposed_seconds + other_seconds.
    """

    key: str
    """Name of the scheme in `SCHEMES`, such as `tap_vrsp`."""
    label: str
    """Name for readers."""
    step_seconds: float
    """Predicted seconds of an optimizer step."""
    attention_seconds: float
    """Seconds in which the busiest worker of the slowest pool computes attention."""
    exposed_seconds: float
    """Further seconds of attention, in which that worker waits for transfers."""
    other_seconds: float
    """Seconds of the step outside attention."""
    worst_index: float
    """Attention seconds of one layer at the slowest accumulation index, slowest replica."""
    mean_index: float
    """The same, mean over the accumulation indices."""
    speedup: float
    """Step of Ulysses over the step of this scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """Predicted throughput at one number of replicas."""

    dp: int
    """Data-parallel replicas."""
    gpus: int
    """GPUs of all replicas."""
    tokens_per_second: Mapping[str, float]
    """Of every scheme by its key; a scheme that cannot be planned at this size is missing."""
    efficiency: Mapping[str, float]
    """Throughput over that of the scheme `ideal`, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Throughput against the number of replicas."""

    fixed_batch: tuple[ScalePoint, ...]
    """The same global batch for every number of replicas."""
    weak: tuple[ScalePoint, ...]
    """As many microbatches a replica for every number of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoads:
    """Attention of each worker of one pool over the mean worker's."""

    title: str
    """Which pool this is."""
    before: tuple[float, ...]
    """Under Ulysses: every pack shared equally by its own context-parallel group; [workers]."""
    after: tuple[float, ...]
    """As Libra plans it, [workers]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTimes:
    """Histogram of attention seconds of one layer, forward and backward, over microbatches."""

    edges: tuple[float, ...]
    """Edges of the bins in seconds, [bins + 1]."""
    counts: Mapping[str, tuple[int, ...]]
    """Microbatches of each bin for the schemes `ulysses` and `libra`, [bins]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """One pipeline schedule with one number of stages."""

    schedule: ScheduleName
    stages: int
    """Pipeline stages."""
    microbatches: int
    """Microbatches of one replica."""
    bubble: Mapping[str, float]
    """Share of the schedule in which a stage idles, in [0, 1], for the schemes `ulysses`, `libra`
    and `ideal`; mean over the compared windows.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything that a study finds."""

    version: int = 1
    """Version of the JSON format."""
    created: str = ""
    """Date of the study, such as 2026-11-30; empty where no command made it."""
    command: str = ""
    """The command line that asks for the same figures; empty where no command made it."""
    corpus: CorpusSummary
    settings: Settings
    packs: PackSummary
    pooling: tuple[PoolingPoint, ...]
    """One for each power of two that divides the global batch and is less than it."""
    candidates: tuple[CandidateResult, ...]
    """In the order in which they were asked for."""
    recommendation: Recommendation
    schemes: tuple[SchemeResult, ...]
    """In the order of `SCHEMES`, Ulysses first; those that cannot be planned are missing."""
    scaling: Scaling
    workers: WorkerLoads
    microbatches: MicrobatchTimes
    pipeline: tuple[PipelineResult, ...]
    warnings: tuple[str, ...]
    """Sentences that a reader should know before believing the figures."""


def study_json(study: Study) -> dict[str, Any]:
    """The study as JSON has it: dicts, lists and plain values, with null for NaN and infinity."""
    plain: dict[str, Any] = plain_json(dataclasses.asdict(study))
    return plain


def plain_json(value: Any) -> Any:
    """`value` as JSON has it: lists in place of tuples, null in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: plain_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
