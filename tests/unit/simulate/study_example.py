"""A study as `libra simulate` makes it: a 256K corpus on 256 GPUs, made by hand.

Figures are plausible, not measured; pools are as unequal as in the Libra paper's Table 1.
"""

from __future__ import annotations

import math
from itertools import pairwise

from libra.cost.hardware import CLUSTERS
from libra.cost.models import MODELS
from libra.cost.parallelism import Parallelism
from libra.cost.pipeline import ScheduleName
from libra.simulate.results import (
    CandidateResult,
    CorpusSummary,
    LengthBins,
    MicrobatchTimes,
    PackSummary,
    PipelineResult,
    PoolingPoint,
    Recommendation,
    ScalePoint,
    Scaling,
    SchemeResult,
    Settings,
    Study,
    Trailing,
    WorkerLoads,
)

POOLS = (2, 4, 8, 16, 32)
BEFORE = (3.4617, 1.9776, 1.0770, 0.5616, 0.2548)
GREEDY = (2.3059, 0.6635, 0.0050, 0.0006, 0.0002)
SCHEMES = (
    ("ulysses", "Ulysses", 5.21, 0.22),
    ("wlb", "WLB-LLM packing", 3.88, 0.22),
    ("cluster", "Cluster-wide pool", 2.31, 1.05),
    ("tap", "TAP", 3.12, 0.55),
    ("tap_vrsp", "TAP + VRSP", 2.362, 0.58),
    ("libra", "Libra", 2.362, 0.154),
    ("ideal", "Ideal", 2.29, 0.0),
)
OTHER = 3.06
"""Seconds of a step outside attention."""
SCHEDULES: tuple[tuple[ScheduleName, float], ...] = (
    ("gpipe", 0.158),
    ("1f1b", 0.158),
    ("interleaved", 0.086),
)


def study_example() -> Study:
    return Study(
        created="2026-11-30",
        command="libra simulate lengths-code.npy --tokens 262144 --gpus 256 --json code.json",
        corpus=CorpusSummary(
            source="lengths-code.npy",
            samples=10_240_118,
            tokens=33_554_432_000,
            median=644,
            mean=3276.8,
            longest=262_144,
            dropped_samples=1_214,
            dropped_tokens=612_114_230,
            cut_samples=0,
            padding_tokens=1_204_511,
            left_over_tokens=20_114_032,
            windows=1000,
            windows_replayed=64,
            histogram=_histogram(),
        ),
        settings=Settings(
            model=MODELS["qwen3-30b-a3b"],
            parameters=MODELS["qwen3-30b-a3b"].parameters,
            cluster=CLUSTERS["h100"],
            parallelism=Parallelism(dp=32, cp=8, global_batch=128, tokens=262_144),
            packing="sequential",
            longer="drop",
            placement="surplus",
            chunks=4,
            tolerance=0.03,
            memory_cap_bytes=76 * 10**9,
            kernel_table="published H100 figures, FlashAttention 3",
        ),
        packs=PackSummary(
            quantiles=tuple(
                0.06 + 0.5 * (i / 100) ** 1.4 + 6.1 * (i / 100) ** 22 for i in range(101)
            ),
            cv=1.71,
            heaviest=6.66,
            padding_share=0.00004,
        ),
        pooling=tuple(
            PoolingPoint(
                pool_size=size,
                before=before,
                after_greedy=greedy,
                after=max(greedy * (0.97 if size <= 4 else 0.3), 0.00002),
                random=0.94 * before,
                theory=1.71 / math.sqrt(size) * math.sqrt(2 * math.log(128 / size)),
                bound=greedy * 0.96 if size <= 4 else 0.0,
            )
            for size, before, greedy in zip(POOLS, BEFORE, GREEDY, strict=True)
        ),
        candidates=tuple(_candidates()),
        recommendation=Recommendation(
            candidate=6,
            line="libra.PoolConfig(pool_size=8, block_size=2048, head_shards=1, chunks=4)",
            text=(
                "Share attention among pools of 8 replicas with blocks of 2K tokens: the predicted "
                "step takes 5.58 s, 1.52 times as fast as Ulysses, and fits in 69 of 76 GB."
            ),
            trailing=(
                Trailing(candidate=8, behind=0.0016),
                Trailing(candidate=9, behind=0.0138),
            ),
        ),
        schemes=tuple(
            SchemeResult(
                key=key,
                label=label,
                step_seconds=attention + exposed + OTHER,
                attention_seconds=attention,
                exposed_seconds=exposed,
                other_seconds=OTHER,
                speedup=(5.21 + 0.22 + OTHER) / (attention + exposed + OTHER),
                worst_index=attention / 2.29 * 1.04,
                mean_index=attention / 2.29,
            )
            for key, label, attention, exposed in SCHEMES
        ),
        scaling=Scaling(
            fixed_batch=tuple(_scaled(dp, 0.0) for dp in (1, 2, 4, 8, 16, 32, 64, 128)),
            weak=tuple(_scaled(dp, 0.05) for dp in (1, 4, 16, 64, 256, 1024)),
        ),
        workers=WorkerLoads(
            before=tuple(
                load for load in (0.31, 0.44, 3.9, 0.52, 0.28, 1.35, 0.6, 0.6) for _ in range(8)
            ),
            after=tuple(1.0 + 0.03 * math.cos(1.7 * i) for i in range(64)),
            title="Pool 0 of window 0: load over the mean",
        ),
        microbatches=MicrobatchTimes(
            edges=tuple(1.0 + 0.15 * i for i in range(25)),
            counts={
                "ulysses": tuple(int(900 * math.exp(-0.33 * i)) + (i % 3) for i in range(24)),
                "libra": (0, 0, 41, 2710, 312, 20, 3, *([0] * 17)),
            },
        ),
        pipeline=tuple(
            PipelineResult(
                schedule=name,
                stages=4,
                microbatches=16,
                bubble={"ulysses": ideal + 0.21, "libra": ideal + 0.012, "ideal": ideal},
            )
            for name, ideal in SCHEDULES
        ),
        warnings=(
            "1,214 samples longer than 262,144 tokens were dropped (1.8% of the tokens).",
            "The kernel table is a published one: run libra calibrate on the cluster for yours.",
        ),
    )


def _histogram() -> LengthBins:
    """Log bins, six a doubling: a lognormal body and a Pareto tail with a cut at 256K."""
    edges = [round(2 ** (4 + i / 6)) for i in range(6 * 14 + 1)]
    samples, middles = [], []
    for low, high in pairwise(edges):
        middle = math.sqrt(low * high)
        body = math.exp(-0.5 * (math.log(middle / 636) / 1.0) ** 2)
        tail = 0.012 * (middle / 6913) ** -0.375 if middle > 6913 else 0.0
        middles.append(middle)
        samples.append(round(480_000 * (body + tail)))
    return LengthBins(
        edges=tuple(edges),
        samples=tuple(samples),
        tokens=tuple(round(n * m) for n, m in zip(samples, middles, strict=True)),
        squares=tuple(n * m**2 for n, m in zip(samples, middles, strict=True)),
    )


def _candidates() -> list[CandidateResult]:
    found = []
    for rank, size in enumerate(POOLS):
        for block, shards in ((2048, 1), (4096, 1), (4096, 4))[: 2 if size == 32 else 3]:
            after = max(GREEDY[rank] * (0.97 if size <= 4 else 0.3), 0.00002)
            within = 0.022 + 0.004 * rank + (0.006 if block == 4096 else 0.0) - 0.004 * (shards > 1)
            traffic = (1.1 + 0.95 * rank) * (1.0 + 0.12 * (shards > 1) + 0.05 * (block == 2048))
            exposed = 0.08 + 0.035 * rank * traffic / 3
            step = 2.29 * (1 + after) * (1 + within) + exposed + OTHER
            memory = 61.0 + 3.5 * rank + 1.2 * traffic / 3
            found.append(
                CandidateResult(
                    pool_size=size,
                    block_size=block,
                    head_shards=shards,
                    before=BEFORE[rank],
                    after=after,
                    intra_mean=within,
                    intra_worst=within + 0.011,
                    gigabytes=traffic,
                    between_nodes_gigabytes=0.86 * traffic,
                    sent_worst_gigabytes=0.031 * traffic,
                    received_worst_gigabytes=0.028 * traffic,
                    extra_memory_gigabytes=0.9 + 0.2 * rank,
                    tiles=size * 262_144 // block * shards,
                    plan_milliseconds=1.2 * size * shards,
                    step_seconds=step,
                    step_low=step * 0.99,
                    step_high=step * 1.014,
                    tokens_per_second=128 * 262_144 / step,
                    exposed_share=exposed / step,
                    memory_gigabytes=memory,
                    fits=memory <= 76.0,
                    problem=None if memory <= 76.0 else "needs more memory than a GPU has",
                    estimates={},
                )
            )
    return found


def _scaled(dp: int, growth: float) -> ScalePoint:
    """Ulysses loses with each doubling, Libra little."""
    doublings = math.log2(dp)
    losses = {
        "ulysses": 1 + 0.11 * doublings + growth * doublings,
        "wlb": 1 + 0.075 * doublings + growth * doublings,
        "cluster": 1 + 0.004 * doublings**2,
        "libra": 1 + 0.008 * doublings,
        "ideal": 1.0,
    }
    return ScalePoint(
        dp=dp,
        gpus=8 * dp,
        tokens_per_second={key: 197_000 * dp / loss for key, loss in losses.items()},
        efficiency={key: 1 / loss for key, loss in losses.items()},
    )
