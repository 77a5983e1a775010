"""The parts of a study that compare schemes: a few windows, and every way to balance them.

Schemes are also compared at other numbers of replicas, with one global batch for all, or as many
packs a replica.  With a fixed batch more replicas leave fewer microbatches to each, and one heavy
pack stalls more of them; with weak scaling the largest of ever more packs does.  Pools are bounded,
so both cost Libra less and less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.cost.pipeline import ScheduleName
from libra.data.lengths import IntArray
from libra.data.packing import Packs
from libra.data.pools import make_pools
from libra.plan.geometry import spread
from libra.simulate.predict import Setting, WindowSeconds, ideal_seconds, scheme_seconds
from libra.simulate.results import (
    MicrobatchTimes,
    PipelineResult,
    ScalePoint,
    Scaling,
    SchemeResult,
    WorkerLoads,
)
from libra.simulate.schemes import PREDICTED, SCHEMES

FloatArray = NDArray[np.float64]

_SCHEDULES: Final[tuple[ScheduleName, ...]] = ("gpipe", "1f1b", "interleaved")
_STAGES: Final = (2, 4, 8)
_BINS: Final = 40
_SCALED: Final = ("ulysses", "cluster", "libra", "ideal")
"""Schemes whose throughput is predicted for every number of replicas of a fixed batch."""
_MOST_PACKS: Final = 4096
"""Packs of the largest window that is drawn for weak scaling."""

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, how much of it is done, and how much there is, None while unknown."""


def compare_schemes(
    windows: Sequence[Packs],
    libra: Sequence[WindowSeconds],
    setting: Setting,
    progress: Progress,
) -> dict[str, list[WindowSeconds]]:
    """Every scheme in every window; schemes that can't be planned are missing.

    `libra` is known from the replay: the candidate that `setting` has, in the same windows.
    """
    found: dict[str, list[WindowSeconds]] = {}
    pairs = list(product(PREDICTED, range(len(windows))))
    for done, (scheme, n) in enumerate(pairs):
        progress("comparing schemes", done, len(pairs))
        seconds: WindowSeconds | None
        if scheme == "libra":
            seconds = libra[n]
        elif scheme == "ideal":
            # Follows from Ulysses, which comes first.
            seconds = ideal_seconds(found["ulysses"][n], windows[n].tokens, setting)
        else:
            seconds = scheme_seconds(windows[n], setting, scheme)
        if seconds is not None:
            found.setdefault(scheme, []).append(seconds)
    progress("comparing schemes", len(pairs), len(pairs))
    return found


def scheme_results(
    schemes: Mapping[str, Sequence[WindowSeconds]], setting: Setting
) -> tuple[SchemeResult, ...]:
    """Step times in three parts: attention that the slowest pool computes, other seconds of its
    attention, and everything outside attention.
    """
    results: list[SchemeResult] = []
    for key, windows in schemes.items():
        parts = np.mean([_step_parts(each, setting) for each in windows], axis=0)
        step, attention, computed, worst, mean = parts.tolist()
        results.append(
            SchemeResult(
                key=key,
                label=SCHEMES[key].label,
                step_seconds=step,
                attention_seconds=computed,
                exposed_seconds=max(0.0, attention - computed),
                other_seconds=step - attention,
                worst_index=worst,
                mean_index=mean,
                speedup=(results[0].step_seconds if results else step) / step,
            )
        )
    return tuple(results)


def _step_parts(figures: WindowSeconds, setting: Setting) -> tuple[float, ...]:
    """Seconds of one window: its step, the attention of its slowest replica, the part of that
    which is computed, and one layer's attention at the slowest and at the mean index.
    """
    spread = setting.parallelism
    # Step 1: attention of every replica and index in one layer, [GA, DP].
    forward, backward, computed = (
        figures.replicas(each, spread)
        for each in (figures.forward, figures.backward, figures.compute)
    )
    once = forward + backward
    # Step 2: the replica with the most attention, recomputed forwards included.
    spent = (once + (forward if spread.recompute == "full" else 0.0)).sum(axis=0)
    slowest = int(spent.argmax())
    share = computed.sum(axis=0)[slowest] / once.sum(axis=0)[slowest]
    # Step 3: all layers of a rank.
    attention = spread.chunk_layers(setting.model) * spread.virtual_stages * spent[slowest]
    indices = once.max(axis=1)
    step = figures.step(setting).seconds
    return step, attention, attention * share, indices.max(), indices.mean()


def worker_loads(packs: Packs, setting: Setting) -> WorkerLoads:
    """Load of each worker of the first pool of a window, before and after."""
    size, dp = setting.config.pool_size, setting.parallelism.dp
    # VRSP fills the first pool with the heaviest pack first.
    pool = make_pools(packs.workloads, size, dp // size, order="index")[0]
    plan = setting.plan(map(packs.lengths_of, pool), packs.tokens, setting.config)
    mean = max(float(plan.load.mean()), 1.0)
    # Ulysses shares a pack equally in its CP group, so all workers of a group have its mean load.
    groups = plan.home_load.reshape(size, -1).mean(axis=1)
    before: FloatArray = np.repeat(groups, setting.parallelism.cp) / mean
    return WorkerLoads(
        title=f"First pool of the first compared window: {plan.workers} workers",
        before=tuple(before.tolist()),
        after=tuple((plan.load / mean).tolist()),
    )


def microbatch_times(
    schemes: Mapping[str, Sequence[WindowSeconds]], setting: Setting
) -> MicrobatchTimes:
    """Histogram of the attention seconds of a microbatch in one layer, both passes."""
    spread = setting.parallelism
    times = {
        key: np.concatenate(
            [each.replicas(each.forward + each.backward, spread).ravel() for each in windows]
        )
        for key, windows in schemes.items()
        if key in ("ulysses", "libra")
    }
    longest = max(float(each.max()) for each in times.values())
    # The last bin includes its upper edge; the room above guards against rounding.
    edges = np.linspace(0.0, longest * (1 + 1e-9) or 1.0, _BINS + 1)
    return MicrobatchTimes(
        edges=tuple(edges.tolist()),
        counts={key: tuple(np.histogram(each, edges)[0].tolist()) for key, each in times.items()},
    )


def pipeline_results(
    schemes: Mapping[str, Sequence[WindowSeconds]], setting: Setting
) -> tuple[PipelineResult, ...]:
    """Bubble shares of every schedule at the cluster's stages; without any, at 2, 4 and 8."""
    stages = _STAGES if setting.parallelism.pp == 1 else (setting.parallelism.pp,)
    results = []
    for schedule, depth in product(_SCHEDULES, stages):
        at = _staged(setting, schedule, depth)
        if at is None:
            continue
        bubble = {
            key: float(np.mean([each.step(at).bubble_share for each in schemes[key]]))
            for key in ("ulysses", "libra", "ideal")
            if key in schemes
        }
        micros = at.parallelism.microbatches
        results.append(
            PipelineResult(schedule=schedule, stages=depth, microbatches=micros, bubble=bubble)
        )
    return tuple(results)


def _staged(setting: Setting, schedule: ScheduleName, stages: int) -> Setting | None:
    """The setting with another schedule; None where stages don't divide layers or microbatches."""
    virtual = 2 if schedule == "interleaved" else 1
    try:
        spread = replace(setting.parallelism, pp=stages, schedule=schedule, virtual_stages=virtual)
        spread.chunk_layers(setting.model)
    except ValueError:
        return None
    return replace(setting, parallelism=spread)


def scale_replicas(
    packs: Packs,
    known: Mapping[str, WindowSeconds],
    setting: Setting,
    progress: Progress,
    *,
    most: int,
    seed: int,
) -> Scaling:
    """Throughput against replicas on one window of GBS packs, up to `most` replicas.

    `known` are schemes at the setting's own number of replicas, Ulysses among them.
    """
    steps = count(1)

    def told(points: Iterable[ScalePoint]) -> Iterator[ScalePoint]:
        for point in points:
            progress("scaling", next(steps), None)
            yield point

    return Scaling(
        fixed_batch=tuple(told(fixed_batch(packs, known, setting, most=most))),
        weak=tuple(told(weak(packs, known["ulysses"], setting, most=most, seed=seed))),
    )


def fixed_batch(
    packs: Packs, known: Mapping[str, WindowSeconds], setting: Setting, *, most: int
) -> Iterator[ScalePoint]:
    """Replicas 1, 2, 4, ... up to `most` that divide the global batch of the setting, on one window
    of GBS packs.

    Attention seconds depend on the replicas through the size of pools only, so equal pools are
    planned once; `known` are those of some schemes at the setting's own.
    """
    # Seconds by scheme and replicas of a pool; None where pools are too large to plan.
    table: dict[tuple[str, int], WindowSeconds | None] = {
        (key, each.pool_size): each for key, each in known.items()
    }
    for at in _respread(setting, most, weak=False):
        found = {}
        for key in _SCALED:
            size = SCHEMES[key].pool_size(setting.config.pool_size, at.parallelism.dp)
            if (key, size) not in table:
                table[key, size] = scheme_seconds(packs, at, key)
            found[key] = table[key, size]
        yield _point(at, found)


def weak(
    packs: Packs, alone: WindowSeconds, setting: Setting, *, most: int, seed: int
) -> Iterator[ScalePoint]:
    """Ulysses, Libra and ideal with 1, 2, 4, ... replicas, as many microbatches each as the setting
    has, up to `most` replicas.

    A window of GA * dp packs is drawn from `packs`: without repetition, as long as there are
    enough.  `alone` is Ulysses on every one of the packs; it takes packs one by one, so a drawn
    window needs no plans of its own.
    """
    source = np.random.default_rng(seed)
    for at in _respread(setting, most, weak=True):
        drawn = _draw(len(packs), at.parallelism.global_batch, source)
        ulysses = alone.take(drawn)
        found = {
            "ulysses": ulysses,
            "ideal": ideal_seconds(ulysses, packs.tokens, at),
            "libra": scheme_seconds(select_packs(packs, drawn), at, "libra"),
        }
        yield _point(at, found)


def select_packs(packs: Packs, chosen: IntArray) -> Packs:
    """Some packs, in the order given and as often as named."""
    # Packs of 2 3 1 pieces, packs 2 0 chosen: pieces 5 0 1, offsets 0 1 3.
    counts = np.diff(packs.offsets)[chosen]
    where = spread(packs.offsets[chosen], counts)
    return Packs(
        tokens=packs.tokens,
        lengths=packs.lengths[where],
        offsets=np.append(0, np.cumsum(counts)),
        samples=packs.samples[where],
        starts=packs.starts[where],
    )


def _point(at: Setting, found: Mapping[str, WindowSeconds | None]) -> ScalePoint:
    rates = {
        key: seconds.step(at).tokens_per_second
        for key, seconds in found.items()
        if seconds is not None
    }
    return ScalePoint(
        dp=at.parallelism.dp,
        gpus=at.parallelism.ranks,
        tokens_per_second=rates,
        efficiency={key: rate / rates["ideal"] for key, rate in rates.items()},
    )


def _draw(packs: int, wanted: int, source: np.random.Generator) -> IntArray:
    """Packs drawn at random: a second time only once every pack was drawn."""
    # Two packs, five wanted: 1 0 | 0 1 | 1.
    rounds = [source.permutation(packs) for _ in range(-(-wanted // packs))]
    return np.concatenate(rounds)[:wanted]


def _respread(setting: Setting, most: int, *, weak: bool) -> Iterator[Setting]:
    """The setting with 1, 2, 4, ... replicas up to `most`, where it can be spread so: with its own
    global batch, or with its own microbatches a replica.
    """
    spread = setting.parallelism
    limit = _MOST_PACKS // spread.microbatches if weak else spread.global_batch
    for dp in (1 << i for i in range(min(most, limit).bit_length())):
        batch = spread.microbatches * dp if weak else spread.global_batch
        try:
            shape = replace(spread, dp=dp, global_batch=batch)
        except ValueError:
            continue
        yield replace(setting, parallelism=shape)
