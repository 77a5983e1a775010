"""Which candidate to take: the least predicted step that fits the memory, and who trails it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra.config import PoolConfig
from libra.simulate.figures import Candidate
from libra.simulate.sample import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a candidate costs."""

    candidate: Candidate
    step_seconds: Estimate
    tokens_per_second: float
    exposed_share: float
    """Attention time that the busiest worker of a pool does not compute, over all of it."""
    memory_bytes: float
    """Of a rank, at the worst moment of the worst window."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The verdicts, best first, those that fit before those that don't."""

    ranked: tuple[int, ...]
    """Indices of the verdicts."""
    behind: tuple[float, ...]
    """How much longer than the best each one's step takes, 0.01 for 1%."""
    line: str | None
    """The `PoolConfig(...)` of the best that fits; None where none does."""
    text: str
    """One sentence."""


def recommend(verdicts: Sequence[Verdict], config: PoolConfig, cap: float) -> Recommendation:
    """Rank `verdicts`.  `config` has the settings that candidates don't; `cap` is in bytes.

    Of steps that differ by less than 0.5% the smaller pool comes first: it needs the fewer
    connections and its members wait for fewer others.
    """
    fitting = [i for i, each in enumerate(verdicts) if each.fits]
    others = [i for i, each in enumerate(verdicts) if not each.fits]

    def step(i: int) -> float:
        return verdicts[i].step_seconds.mean

    fitting.sort(key=step)
    others.sort(key=step)
    if fitting:
        near = [i for i in fitting if step(i) <= 1.005 * step(fitting[0])]
        best = min(near, key=lambda i: (verdicts[i].candidate.pool_size, step(i)))
        fitting.remove(best)
        fitting.insert(0, best)
    ranked = (*fitting, *others)
    first = step(ranked[0])
    behind = tuple(step(i) / first - 1 for i in ranked)
    if not fitting:
        least = min(each.memory_bytes for each in verdicts)
        text = (
            f"No candidate fits {cap / 1e9:.1f} GB: the smallest needs {least / 1e9:.1f} GB a GPU. "
            "Shard more (tp, pp, cp, dp), or recompute activations."
        )
        return Recommendation(ranked=ranked, behind=behind, line=None, text=text)
    best = ranked[0]
    won = verdicts[best]
    text = (
        f"Take {won.candidate}: a step of {won.step_seconds.mean:.2f} s, "
        f"{won.tokens_per_second:,.0f} tokens/s"
    )
    if len(fitting) > 1:
        text += f"; next is {verdicts[ranked[1]].candidate}, {_trail(behind[1])}"
    return Recommendation(
        ranked=ranked, behind=behind, line=config_line(won.candidate, config), text=text + "."
    )


def _trail(behind: float) -> str:
    if behind < 0:
        return f"{-behind:.1%} faster with larger pools"
    return f"{behind:.1%} slower"


def config_line(candidate: Candidate, config: PoolConfig) -> str:
    """The line to paste: the candidate, and settings other than the defaults."""
    default = PoolConfig()
    chosen = config.replace(
        pool_size=candidate.pool_size,
        block_size=candidate.block_size,
        head_shards=candidate.head_shards,
    )
    always = ("pool_size", "block_size", "head_shards", "chunks")
    shown = [
        f"{name}={getattr(chosen, name)!r}"
        for name in PoolConfig.__dataclass_fields__
        if name in always or getattr(chosen, name) != getattr(default, name)
    ]
    return f"libra.PoolConfig({', '.join(shown)})"
