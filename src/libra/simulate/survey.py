"""A corpus at a glance: its lengths, how unequal its packs are, and what to be careful about."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libra.simulate.pooling import variation
from libra.simulate.predict import Setting
from libra.simulate.results import CorpusSummary, LengthBins, PackSummary
from libra.simulate.windows import CorpusCounts

FloatArray = NDArray[np.float64]


def summarise_corpus(source: str, counts: CorpusCounts, *, replayed: int) -> CorpusSummary:
    """The corpus `source` from what a `WindowReader` counted; `replayed` windows were replayed."""
    histogram = counts.histogram
    plain = histogram.as_dict()
    return CorpusSummary(
        source=source,
        samples=counts.samples,
        tokens=counts.tokens,
        median=histogram.quantile(0.5),
        mean=histogram.mean,
        longest=counts.longest,
        dropped_samples=counts.dropped_samples,
        dropped_tokens=counts.dropped_tokens,
        cut_samples=counts.cut_samples,
        padding_tokens=counts.padding_tokens,
        left_over_tokens=counts.left_over_tokens,
        windows=counts.windows,
        windows_replayed=replayed,
        histogram=LengthBins(
            edges=(*plain["from"], plain["to"][-1] + 1),
            samples=tuple(plain["samples"]),
            tokens=tuple(plain["tokens"]),
            # Lengths of a bin are alike, so their squares sum to tokens^2 / samples.
            squares=tuple(
                float(tokens) ** 2 / max(samples, 1)
                for samples, tokens in zip(plain["samples"], plain["tokens"], strict=True)
            ),
        ),
    )


def summarise_packs(workloads: FloatArray, counts: CorpusCounts, tokens: int) -> PackSummary:
    """How unequal packs of `tokens` tokens are; `workloads` [windows, GBS]."""
    packs = workloads.ravel()
    mean = max(float(packs.mean()), 1.0)
    means = np.maximum(workloads.mean(axis=1), 1.0)
    return PackSummary(
        quantiles=tuple((np.percentile(packs, np.arange(101)) / mean).tolist()),
        cv=variation(packs),
        heaviest=float((workloads.max(axis=1) / means).mean()),
        padding_share=counts.padding_tokens / (tokens * packs.size),
    )


def find_warnings(counts: CorpusCounts, workloads: FloatArray, setting: Setting) -> tuple[str, ...]:
    """Sentences that a reader should know before believing the figures."""
    found, spread, config = [], setting.parallelism, setting.config
    if counts.dropped_samples:
        share = counts.dropped_tokens / counts.tokens
        found.append(
            f"{counts.dropped_samples:,} samples longer than {spread.tokens:,} tokens were "
            f"dropped, {share:.1%} of all tokens; longer='cut' keeps them in pieces"
        )
    if counts.cut_samples:
        found.append(f"{counts.cut_samples:,} samples were cut because they are longer than a pack")
    if counts.padding_tokens > 0.05 * workloads.size * spread.tokens:
        found.append("more than 5% of all packs is padding; a larger buffer packs tighter")
    if counts.windows < 4:
        found.append(f"the corpus fills {counts.windows} window(s) only: figures may be luck")
    if config.placement == "paper":
        mean = float(workloads.mean()) / spread.tokens**2
        tile = 2 * config.block_size * spread.cp / (config.head_shards * spread.tokens * mean)
        if tile > 1 + config.tolerance:
            found.append(
                f"the largest tile is {tile:.2f} of a worker's share: no placement of whole tiles "
                "can balance; choose a smaller block_size or more head_shards"
            )
    return tuple(found)
