"""The parts of a study that describe the corpus, the settings and the candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.data.refinement import bound
from libra.simulate.figures import CandidateFigures
from libra.simulate.pools import pool_curve
from libra.simulate.recommend import Recommendation, Verdict
from libra.simulate.schemes import Setting
from libra.simulate.theory import expected_imbalance, random_grouping, variation
from libra.simulate.windows import CorpusCounts

if TYPE_CHECKING:
    from libra.simulate.study import Study

FloatArray = NDArray[np.float64]

_CURVE_WINDOWS: Final = 500
"""Most windows that the imbalance curve looks at."""


def describe_corpus(
    study: Study, counts: CorpusCounts, windows: int, replayed: int
) -> dict[str, Any]:
    histogram = counts.histogram
    plain = histogram.as_dict()
    samples, tokens = np.array(plain["samples"]), np.array(plain["tokens"])
    return {
        "source": study.source,
        "samples": counts.samples,
        "tokens": counts.tokens,
        "median": histogram.quantile(0.5),
        "mean": histogram.mean,
        "longest": counts.longest,
        "dropped_samples": counts.dropped_samples,
        "dropped_tokens": counts.dropped_tokens,
        "cut_samples": counts.cut_samples,
        "padding_tokens": counts.padding_tokens,
        "left_over_tokens": counts.left_over_tokens,
        "windows": windows,
        "windows_replayed": replayed,
        "histogram": {
            "edges": [*plain["from"], plain["to"][-1] + 1],
            "samples": plain["samples"],
            "tokens": plain["tokens"],
            # lengths of a bin are alike: their squares sum to tokens^2 / samples
            "squares": (tokens.astype(np.float64) ** 2 / np.maximum(samples, 1)).tolist(),
        },
    }


def describe_settings(study: Study) -> dict[str, Any]:
    model, cluster, spread = study.model, study.cluster, study.parallelism
    return {
        "model": {
            "name": model.name,
            "layers": model.layers,
            "q_heads": model.q_heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "parameters": model.parameters,
        },
        "cluster": {"name": cluster.name, "ranks_per_node": cluster.ranks_per_node},
        "parallelism": {
            name: getattr(spread, name)
            for name in ("dp", "cp", "tp", "pp", "ep", "global_batch", "tokens", "recompute")
        },
        "packing": study.packing,
        "longer": study.longer,
        "placement": study.config.placement,
        "chunks": study.config.chunks,
        "tolerance": study.config.tolerance,
        "memory_cap_bytes": study.cap,
        "kernel_table": study.table.source,
    }


def describe_packs(workloads: FloatArray, counts: CorpusCounts, tokens: int) -> dict[str, Any]:
    flat = workloads.ravel()
    mean = max(float(flat.mean()), 1.0)
    means = np.maximum(workloads.mean(axis=1), 1.0)
    return {
        "quantiles": (np.percentile(flat, np.arange(101)) / mean).tolist(),
        "cv": variation(flat),
        "heaviest": float((workloads.max(axis=1) / means).mean()),
        "padding_share": counts.padding_tokens / (tokens * flat.size),
    }


def pooling_rows(workloads: FloatArray, *, seed: int) -> list[dict[str, Any]]:
    """Imbalance between pools against P: as it comes, as placed, at random, in theory."""
    batch = workloads.shape[1]
    sizes = [1 << i for i in range(batch.bit_length()) if batch % (1 << i) == 0]
    sizes = [size for size in sizes if size < batch]
    if not sizes:
        return []
    some = workloads[
        np.unique(np.linspace(0, len(workloads) - 1, _CURVE_WINDOWS).round().astype(int))
    ]
    curve = pool_curve([window.astype(np.int64) for window in some], sizes)
    drawn = random_grouping(workloads.ravel(), packs=batch, pool_sizes=sizes, draws=400, seed=seed)
    theory = expected_imbalance(variation(workloads.ravel()), batch, sizes)
    least = [
        np.mean([bound(window, size) / max(window.mean() * size, 1.0) - 1 for window in some[:50]])
        for size in sizes
    ]
    return [
        {
            "pool_size": size,
            "before": float(curve.before[:, i].mean()),
            "after_greedy": float(curve.placed[:, i].mean()),
            "after": float(curve.refined[:, i].mean()),
            "random": float(drawn.imbalance[i]),
            "theory": float(theory[i]),
            "bound": float(least[i]),
        }
        for i, size in enumerate(sizes)
    ]


def candidate_row(verdict: Verdict, figures: CandidateFigures) -> dict[str, Any]:
    giga = 1e9
    return {
        "pool_size": verdict.candidate.pool_size,
        "block_size": verdict.candidate.block_size,
        "head_shards": verdict.candidate.head_shards,
        "before": figures["pools_before"].mean,
        "after": figures["pools_after"].mean,
        "intra_mean": figures["workers_after"].mean,
        "intra_worst": figures["workers_after"].most,
        "gigabytes": figures["moved_bytes"].mean / giga,
        "between_nodes_gigabytes": figures["across_bytes"].mean / giga,
        "sent_worst_gigabytes": figures["worst_sent"].most / giga,
        "received_worst_gigabytes": figures["worst_received"].most / giga,
        "extra_memory_gigabytes": (figures["kept_bytes"].most + figures["workspace_bytes"].most)
        / giga,
        "tiles": figures["tiles"].mean,
        "plan_milliseconds": figures["planning_seconds"].mean * 1e3,
        "step_seconds": verdict.step_seconds.mean,
        "step_low": verdict.step_seconds.low,
        "step_high": verdict.step_seconds.high,
        "tokens_per_second": verdict.tokens_per_second,
        "exposed_share": verdict.exposed_share,
        "memory_gigabytes": verdict.memory_bytes / giga,
        "fits": verdict.fits,
        "problem": None if verdict.fits else "needs more memory than a GPU has",
        "estimates": figures.as_dict(),
    }


def describe_advice(advice: Recommendation, schemes: list[dict[str, Any]]) -> dict[str, Any]:
    """The recommendation, and which scheme that is no part of it is predicted to beat it."""
    steps = {row["key"]: row for row in schemes}
    libra, text = steps.get("libra"), advice.text
    others = [steps[key] for key in ("ulysses", "wlb", "cluster") if key in steps]
    faster = min(others, key=lambda row: float(row["step_seconds"]))
    if libra is not None and faster["step_seconds"] < 0.995 * libra["step_seconds"]:
        ahead = libra["step_seconds"] / faster["step_seconds"] - 1
        text += f" In the compared windows {faster['label']} is {ahead:.1%} faster than it."
    return {
        "candidate": advice.ranked[0] if advice.line is not None else None,
        "line": advice.line,
        "text": text,
        "trailing": [
            {"candidate": i, "behind": behind}
            for i, behind in zip(advice.ranked[1:], advice.behind[1:], strict=True)
        ],
    }


def find_warnings(
    study: Study, counts: CorpusCounts, workloads: FloatArray, setting: Setting
) -> list[str]:
    """What a reader should know before believing the figures."""
    told, spread, config = [], study.parallelism, setting.config
    if counts.dropped_samples:
        share = counts.dropped_tokens / counts.tokens
        told.append(
            f"{counts.dropped_samples:,} samples longer than {spread.tokens:,} tokens were "
            f"dropped, {share:.1%} of all tokens; longer='cut' keeps them in pieces"
        )
    if counts.cut_samples:
        told.append(f"{counts.cut_samples:,} samples were cut because they are longer than a pack")
    if counts.padding_tokens > 0.05 * workloads.size * spread.tokens:
        told.append("more than 5% of all packs is padding; a larger buffer packs tighter")
    if len(workloads) < 4:
        told.append(f"the corpus fills {len(workloads)} window(s) only: figures may be luck")
    if config.placement == "paper":
        mean = float(workloads.mean()) / spread.tokens**2
        tile = 2 * config.block_size * spread.cp / (config.head_shards * spread.tokens * mean)
        if tile > 1 + config.tolerance:
            told.append(
                f"the largest tile is {tile:.2f} of a worker's share: no placement of whole tiles "
                "can balance; choose a smaller block_size or more head_shards"
            )
    return told
