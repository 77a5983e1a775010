"""The advice of a study: the candidate to take, those that trail it, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from libra.config import PoolConfig
from libra.simulate.predict import Setting
from libra.simulate.results import (
    CandidateResult,
    CorpusSummary,
    Recommendation,
    SchemeResult,
    Trailing,
)

FloatArray = NDArray[np.float64]


def rank_candidates(candidates: Sequence[CandidateResult]) -> list[int]:
    """Indices of the candidates, best first, those that fit before those that don't.

    Of steps that differ by less than 0.5% from the shortest, the smallest pool comes first: it
    needs the fewest connections, and its members wait for the fewest others.
    """

    def step(i: int) -> float:
        return candidates[i].step_seconds

    # Step 1: by seconds, those that fit first.
    ranked = sorted(range(len(candidates)), key=lambda i: (not candidates[i].fits, step(i)))
    # Step 2: of those about as fast as the first, the smallest pool.
    limit = 1.005 * step(ranked[0])
    near = [i for i in ranked if candidates[i].fits and step(i) <= limit]
    best = min(near, key=lambda i: (candidates[i].pool_size, step(i)), default=ranked[0])
    return [best, *(i for i in ranked if i != best)]


def recommend(
    candidates: Sequence[CandidateResult],
    ranked: Sequence[int],
    schemes: Sequence[SchemeResult],
    *,
    config: PoolConfig,
    cap: float,
) -> Recommendation:
    """Recommend the first of `ranked`, as from `rank_candidates`, unless none fits.

    `config` is the configuration of that candidate, with which `schemes` are compared; `cap` is the
    memory of a GPU in bytes.
    """
    # Step 1: how far each candidate is behind the best.
    best = candidates[ranked[0]]
    behind = [candidates[i].step_seconds / best.step_seconds - 1 for i in ranked]
    # Step 2: the recommendation in words.
    if best.fits:
        text = (
            f"Take {best}: a step of {best.step_seconds:.2f} s, "
            f"{best.tokens_per_second:,.0f} tokens/s"
        )
        if sum(each.fits for each in candidates) > 1:
            ahead = f"{-behind[1]:.1%} faster with larger pools"
            trail = ahead if behind[1] < 0 else f"{behind[1]:.1%} slower"
            text += f"; next is {candidates[ranked[1]]}, {trail}"
        text += "."
    else:
        least = min(each.memory_gigabytes for each in candidates)
        text = (
            f"No candidate fits {cap / 1e9:.1f} GB: the smallest needs {least:.1f} GB a GPU. "
            "Shard more (tp, pp, cp, dp), or recompute activations."
        )
    return Recommendation(
        candidate=ranked[0] if best.fits else None,
        line=config_line(config) if best.fits else None,
        text=text + _faster_scheme(schemes),
        trailing=tuple(
            Trailing(candidate=i, behind=each)
            for i, each in zip(ranked[1:], behind[1:], strict=True)
        ),
    )


def _faster_scheme(schemes: Sequence[SchemeResult]) -> str:
    """A sentence about the scheme outside Libra that beats it by more than 0.5%, else nothing."""
    results = {each.key: each for each in schemes}
    libra = results.get("libra")
    others = [results[key] for key in ("ulysses", "wlb", "cluster") if key in results]
    if libra is None or not others:
        return ""
    fastest = min(others, key=lambda each: each.step_seconds)
    if fastest.step_seconds >= 0.995 * libra.step_seconds:
        return ""
    ahead = libra.step_seconds / fastest.step_seconds - 1
    return f" In the compared windows {fastest.label} is {ahead:.1%} faster than Libra."


def config_line(config: PoolConfig) -> str:
    """The line to paste: P, B, H, M, and the settings that are not the defaults."""
    default = PoolConfig()
    always = ("pool_size", "block_size", "head_shards", "chunks")
    shown = [
        f"{each.name}={getattr(config, each.name)!r}"
        for each in fields(config)
        if each.name in always or getattr(config, each.name) != getattr(default, each.name)
    ]
    return f"libra.PoolConfig({', '.join(shown)})"


def find_warnings(
    corpus: CorpusSummary, workloads: FloatArray, setting: Setting
) -> tuple[str, ...]:
    """Sentences that a reader should know before believing the figures."""
    found, spread, config = [], setting.parallelism, setting.config
    if corpus.dropped_samples:
        share = corpus.dropped_tokens / corpus.tokens
        found.append(
            f"{corpus.dropped_samples:,} samples longer than {spread.tokens:,} tokens were "
            f"dropped, {share:.1%} of all tokens; longer='cut' keeps them in pieces"
        )
    if corpus.cut_samples:
        found.append(f"{corpus.cut_samples:,} samples were cut because they are longer than a pack")
    if corpus.padding_tokens > 0.05 * workloads.size * spread.tokens:
        found.append("more than 5% of all packs is padding; a larger buffer packs tighter")
    if corpus.windows < 4:
        found.append(f"the corpus fills {corpus.windows} window(s) only: figures may be luck")
    if config.placement == "paper":  # `surplus` cuts tiles at any row
        # A pack of one whole sample has 2 * B / L of its work in its last tile.
        mean = float(workloads.mean()) / spread.tokens**2
        tile = 2 * config.block_size * spread.cp / (config.head_shards * spread.tokens * mean)
        if tile > 1 + config.tolerance:
            found.append(
                f"the largest tile is {tile:.2f} of a worker's share: no placement of whole tiles "
                "can balance; choose a smaller block_size or more head_shards"
            )
    return tuple(found)
