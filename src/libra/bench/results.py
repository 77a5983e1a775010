"""Results of `libra bench`: step times, their means, and ratios to Ulysses inside one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import attrgetter
from typing import Final

import numpy as np

from libra.bench.options import BenchOptions

BASELINE: Final = "ulysses"
PARTS: Final = ("compute", "exposed", "wait")
"""Parts of the straggler time: seconds of a `Times`, shares of `Ratios`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One step of one scheme, its layer of median straggler time; or means over steps."""

    straggler: float
    """Seconds of the slowest rank, forward and backward: the sum of its parts."""
    compute: float
    """Like the other parts, a mean over ranks."""
    exposed: float
    wait: float
    cpu: float
    """CPU seconds of the busiest rank's process, network threads included.  Waits do not count, nor
    other work on a busy machine.
    """
    load: float
    """Busiest rank's causal pairs times heads."""
    sent: float
    """Bytes that all ranks send in forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes(Times):
    """The times of one step of a window."""

    window: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """A scheme compared with Ulysses in the same run: times over its mean straggler time."""

    straggler: float
    compute: float
    exposed: float
    wait: float
    slowest: float
    """Mean of the slowest steps, over that of Ulysses."""
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
    mean: Times
    """Over all steps."""
    slowest: Times
    """Of the slowest step of each window, over windows."""
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
    """Means of every scheme and, where Ulysses ran, its ratios to Ulysses.

    The steps of a scheme stand in order of their windows.
    """
    found = {}
    for key, steps in times.items():
        # Steps of windows 0 0 1 1 give the slowest of the first two and the slowest of the others.
        windows = groupby(steps, attrgetter("window"))
        slowest = [max(window, key=attrgetter("straggler")) for _, window in windows]
        found[key] = SchemeResult(steps=tuple(steps), mean=_mean(steps), slowest=_mean(slowest))
    if BASELINE not in found:
        return found
    base = found[BASELINE]
    return {key: replace(each, of_ulysses=_ratios(each, base)) for key, each in found.items()}


def _ratios(result: SchemeResult, base: SchemeResult) -> Ratios:
    mean, seconds = result.mean, base.mean.straggler
    return Ratios(
        straggler=mean.straggler / seconds,
        **{part: getattr(mean, part) / seconds for part in PARTS},
        slowest=result.slowest.straggler / base.slowest.straggler,
        speedup=seconds / mean.straggler,
        slowest_speedup=base.slowest.straggler / result.slowest.straggler,
        cpu_speedup=base.mean.cpu / mean.cpu,
        predicted=base.mean.load / mean.load,
    )


def _mean(steps: Iterable[Times]) -> Times:
    """Means of every field over steps."""
    names = [field.name for field in fields(Times)]
    means = np.mean([attrgetter(*names)(step) for step in steps], axis=0)
    return Times(**dict(zip(names, means.tolist(), strict=True)))
