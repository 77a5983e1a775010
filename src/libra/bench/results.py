"""Results of `libra bench`: step times, their means, and ratios to Ulysses inside one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from libra.bench.options import BenchOptions

BASELINE: Final = "ulysses"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step of one scheme: its layer of median straggler time; seconds are means over ranks."""

    window: int
    step: int
    straggler: float
    """Slowest rank, forward and backward."""
    compute: float
    exposed: float
    wait: float
    cpu: float
    """CPU seconds of the busiest rank's process, network threads included.  Waits do not count, nor
    other work on a busy machine.
    """
    load: int
    """Busiest rank's causal pairs times heads."""
    sent: int
    """Bytes that all ranks send in forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Straggler time and its parts, as means over steps: seconds, or ratios to Ulysses."""

    straggler: float
    compute: float
    exposed: float
    wait: float

    def over(self, seconds: float) -> Means:
        """Each value divided by `seconds`."""
        return Means(**{each.name: getattr(self, each.name) / seconds for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """A scheme compared with Ulysses in the same run."""

    mean: Means
    """Over the mean straggler time of Ulysses."""
    slowest: Means
    """Over the straggler time of the slowest steps of Ulysses."""
    speedup: float
    slowest_speedup: float
    cpu_speedup: float
    """In CPU seconds of the busiest rank, for CPUs that other programs use as well."""
    predicted: float
    """The speedup that the busiest ranks' loads allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeResult:
    """One scheme's steps and their means."""

    steps: tuple[StepTimes, ...]
    mean: Means
    """Over all steps."""
    slowest: Means
    """Of the slowest step of each window, over windows."""
    cpu: float
    """Mean CPU seconds."""
    load: float
    """Mean load of the busiest rank."""
    megabytes: float
    """Mean megabytes sent."""
    of_ulysses: Ratios | None = None
    """None where Ulysses did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A whole run; `dataclasses.asdict` makes the JSON."""

    created: str
    machine: str
    ranks: int
    dp: int
    kernel: str
    dtype: str
    settings: BenchOptions
    names: Mapping[str, str]
    """Label of each scheme."""
    schemes: Mapping[str, SchemeResult]


def compare(times: Mapping[str, Sequence[StepTimes]]) -> dict[str, SchemeResult]:
    """Means of every scheme and, where Ulysses ran, its ratios to Ulysses."""
    found = {key: _scheme_result(steps) for key, steps in times.items()}
    base = found.get(BASELINE)
    if base is None:
        return found
    return {key: replace(each, of_ulysses=_ratios(each, base)) for key, each in found.items()}


def _scheme_result(steps: Sequence[StepTimes]) -> SchemeResult:
    windows = sorted({step.window for step in steps})
    slowest = [
        max((step for step in steps if step.window == window), key=lambda step: step.straggler)
        for window in windows
    ]
    return SchemeResult(
        steps=tuple(steps),
        mean=_means(steps),
        slowest=_means(slowest),
        cpu=_mean(steps, "cpu"),
        load=_mean(steps, "load"),
        megabytes=_mean(steps, "sent") / 1e6,
    )


def _ratios(result: SchemeResult, base: SchemeResult) -> Ratios:
    mean, slowest = base.mean.straggler, base.slowest.straggler
    return Ratios(
        mean=result.mean.over(mean),
        slowest=result.slowest.over(slowest),
        speedup=mean / result.mean.straggler,
        slowest_speedup=slowest / result.slowest.straggler,
        cpu_speedup=base.cpu / result.cpu,
        predicted=base.load / result.load,
    )


def _means(steps: Sequence[StepTimes]) -> Means:
    return Means(**{each.name: _mean(steps, each.name) for each in fields(Means)})


def _mean(steps: Sequence[StepTimes], name: str) -> float:
    return float(np.mean([getattr(step, name) for step in steps]))
