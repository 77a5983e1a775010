"""What a replay finds: one candidate on one window, and one candidate on a corpus.

Three imbalances, which must not be taken for each other, all 0 at best:

- *pools*: between the pools of a window.  Heaviest pool's workload (sum of squared lengths) over
  the mean pool's, - 1.  VRSP and refinement lower it.
- *workers*: inside one pool.  Busiest worker's query-key pairs times heads over the mean of the
  same pool's workers, - 1.  The plan lowers it.
- *steps*: over an optimizer step.  The busiest worker's pairs of each gradient-accumulation index,
  summed over the indices, over the same sum if all workers of the window were equally busy, - 1:
  the attention time that the step loses to waiting where replicas meet at every index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.simulate.sample import Estimate, WindowSample, estimate

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice of what a replay compares."""

    pool_size: int
    """P: data-parallel replicas of a pool."""
    block_size: int
    """B: most query tokens of a tile."""
    head_shards: int
    """H: head shards of a block."""

    def __str__(self) -> str:
        return f"P={self.pool_size} B={self.block_size} H={self.head_shards}"


POOL_FIGURES: Final = (
    "workers_before",
    "workers_after",
    "load",
    "busiest_home",
    "busiest",
    "moved_bytes",
    "across_bytes",
    "worst_sent",
    "worst_received",
    "worst_across",
    "extra_memory",
    "tiles",
    "moved_tiles",
    "planning_seconds",
)
"""What is known of every pool, [pools] in `WindowFigures.pools`; bytes are of one layer's forward.

- workers_before, workers_after: workers imbalance if every row were computed where it lies, and as
  planned;
- load: query-key pairs times heads of the pool;
- busiest_home, busiest: those of its busiest worker, before and as planned;
- moved_bytes, across_bytes: bytes that leave a worker, and those that leave its node;
- worst_sent, worst_received, worst_across: bytes of the one worker that has most of them
  (across nodes: the larger of sent and received);
- extra_memory: most bytes any worker holds beyond its own q, k, v and out;
- tiles, moved_tiles: tiles, and those computed away from home;
- planning_seconds: time to make the plan.

Figures of a `measure` follow under its names.
"""

WINDOW_FIGURES: Final = (
    "heaviest_pack",
    "pools_before",
    "pools_after",
    "pools_above_bound",
    "steps_before",
    "steps_after",
)
"""What is known of every window: fields of `WindowFigures`, estimated in `CandidateFigures`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowFigures:
    """One candidate on one window."""

    window: int
    """Counted from the corpus's first."""
    heaviest_pack: float
    """Workload of the heaviest pack over the mean pack's: no pool smaller than that balances."""
    pools_before: float
    """Pools imbalance of packs grouped in sampler order."""
    pools_after: float
    """Pools imbalance as placed."""
    pools_above_bound: float
    """Heaviest pool over the least any placement could make it, - 1."""
    steps_before: float
    """Steps imbalance of Ulysses: packs in sampler order, each shared equally by its CP group."""
    steps_after: float
    """Steps imbalance as placed and planned."""
    pools: Mapping[str, FloatArray]
    """`POOL_FIGURES` and those measured, float64 [pools] each, in the order of emission."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists; `from_dict` restores them exactly."""
        plain: dict[str, Any] = {"window": self.window}
        plain |= {name: getattr(self, name) for name in WINDOW_FIGURES}
        plain["pools"] = {name: values.tolist() for name, values in self.pools.items()}
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> WindowFigures:
        """The figures that `as_dict` was made of."""
        pools = {name: np.array(v, dtype=np.float64) for name, v in plain["pools"].items()}
        return WindowFigures(**{**plain, "pools": pools})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateFigures:
    """One candidate on the corpus."""

    candidate: Candidate
    windows: tuple[WindowFigures, ...]
    """Each window that was replayed, in corpus order."""
    corpus_windows: int
    """Windows of the corpus, of which these are all or a sample."""
    estimates: Mapping[str, Estimate]
    """`WINDOW_FIGURES`, `POOL_FIGURES` and those measured: means over windows, and over the pools
    of a window where they are a pool's; `most` is over all pools.
    """

    def __getitem__(self, name: str) -> Estimate:
        return self.estimates[name]

    def as_dict(self, *, windows: bool = False) -> dict[str, Any]:
        """Plain numbers, ready for JSON; with `windows` those of every window and pool too."""
        candidate = self.candidate
        plain: dict[str, Any] = {
            "pool_size": candidate.pool_size,
            "block_size": candidate.block_size,
            "head_shards": candidate.head_shards,
            "replayed_windows": len(self.windows),
            "corpus_windows": self.corpus_windows,
            "pools_per_window": len(self.windows[0].pools["load"]),
        }
        plain |= {name: each.as_dict() for name, each in self.estimates.items()}
        if windows:
            plain["windows"] = [each.as_dict() for each in self.windows]
        return plain


def summarise(
    candidate: Candidate, windows: Sequence[WindowFigures], sample: WindowSample
) -> CandidateFigures:
    """Estimates of a candidate from its windows, [sample.windows] in the same order."""
    found: dict[str, Estimate] = {}
    for name in WINDOW_FIGURES:
        values = np.array([getattr(each, name) for each in windows], dtype=np.float64)
        found[name] = estimate(values, sample)
    for name in windows[0].pools:
        means = np.array([each.pools[name].mean() for each in windows])
        most = max(float(each.pools[name].max()) for each in windows)
        found[name] = estimate(means, sample).with_most(most)
    return CandidateFigures(
        candidate=candidate,
        windows=tuple(windows),
        corpus_windows=sample.corpus_windows,
        estimates=found,
    )
