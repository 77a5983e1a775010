"""Throughput against the number of replicas: one global batch for all, or as many packs a replica.

With a fixed batch more replicas leave fewer microbatches to each, and one heavy pack stalls more of
them; with weak scaling the largest of ever more packs does.  Pools are bounded, so both cost Libra
less and less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.cost.parallelism import Parallelism
from libra.data.packing import Packs
from libra.plan.geometry import spread
from libra.simulate.predict import (
    Setting,
    WindowSeconds,
    ideal_seconds,
    scheme_seconds,
    ulysses_seconds,
)
from libra.simulate.results import ScalePoint, Scaling
from libra.simulate.schemes import PREDICTED, SCHEMES

IntArray = NDArray[np.int64]

_COMPARED: Final = ("ulysses", "cluster", "libra", "ideal")
"""Schemes whose throughput is predicted for every number of replicas of a fixed batch."""


def scale_replicas(
    packs: Packs,
    known: Mapping[str, WindowSeconds],
    setting: Setting,
    progress: Callable[[str, int, int | None], None],
    *,
    most: int,
    seed: int,
) -> Scaling:
    """Throughput against replicas on one window of GBS packs.

    `known` are the figures of schemes at the setting's own number of replicas, Ulysses' among them.
    """
    steps = count(1)

    def step() -> None:
        progress("scaling", next(steps), None)

    return Scaling(
        fixed_batch=tuple(
            fixed_batch(packs, setting, schemes=_COMPARED, most=most, known=known, progress=step)
        ),
        weak=tuple(
            weak(packs, setting, alone=known["ulysses"], most=most, progress=step, seed=seed)
        ),
    )


def _point(shape: Parallelism, rates: Mapping[str, float]) -> ScalePoint:
    return ScalePoint(
        dp=shape.dp,
        gpus=shape.ranks,
        tokens_per_second=rates,
        efficiency={key: rate / rates["ideal"] for key, rate in rates.items()},
    )


def fixed_batch(
    packs: Packs,
    setting: Setting,
    *,
    schemes: Sequence[str] = PREDICTED,
    most: int = 1024,
    known: Mapping[str, WindowSeconds] | None = None,
    progress: Callable[[], None] | None = None,
) -> list[ScalePoint]:
    """Replicas 1, 2, 4, ... up to `most` that divide the global batch of the setting, on one window
    of GBS packs.

    Figures depend on the replicas through the size of pools only; `known` are those of some
    schemes at the setting's own.
    """
    batch = setting.parallelism.global_batch
    points = []
    table: dict[tuple[str, int], WindowSeconds | None] = {
        (scheme, found.pool_size): found for scheme, found in (known or {}).items()
    }
    for dp in _powers(min(most, batch)):
        shape = _respread(setting.parallelism, dp=dp, global_batch=batch)
        if shape is None:
            continue
        at = replace(setting, parallelism=shape)
        rates = {}
        for scheme in schemes:
            key = (scheme, SCHEMES[scheme].pool_size(setting.config.pool_size, dp))
            if key not in table:
                table[key] = scheme_seconds(packs, at, scheme)
                if progress is not None:
                    progress()
            found = table[key]
            if found is not None:
                rates[scheme] = found.step(at).tokens_per_second
        points.append(_point(shape, rates))
    return points


def weak(
    packs: Packs,
    setting: Setting,
    *,
    alone: WindowSeconds | None = None,
    most: int = 1024,
    most_packs: int = 4096,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
) -> list[ScalePoint]:
    """Ulysses, Libra and ideal with 1, 2, 4, ... replicas, as many microbatches each as the setting
    has.

    A window of GA * dp packs is drawn from `packs`: without repetition, as long as there are
    enough.  Ends at `most` replicas or `most_packs` packs.  `alone` are Ulysses' figures of the
    packs, where they are known.
    """
    microbatches = setting.parallelism.microbatches
    source = np.random.default_rng(seed)
    points = []
    for dp in _powers(most):
        wanted = microbatches * dp
        if wanted > most_packs:
            break
        shape = _respread(setting.parallelism, dp=dp, global_batch=wanted)
        if shape is None:
            continue
        drawn = _draw(len(packs), wanted, source)
        at = replace(setting, parallelism=shape)
        window = select_packs(packs, drawn)
        if alone is None:
            alone = ulysses_seconds(packs, at)  # of every pack there is, once
        ulysses = alone.take(drawn)
        rates = {
            "ulysses": ulysses.step(at).tokens_per_second,
            "ideal": ideal_seconds(ulysses, packs.tokens, at).step(at).tokens_per_second,
        }
        libra = scheme_seconds(window, at, "libra")
        if libra is not None:
            rates["libra"] = libra.step(at).tokens_per_second
        if progress is not None:
            progress()
        points.append(_point(shape, rates))
    return points


def select_packs(packs: Packs, chosen: IntArray) -> Packs:
    """Some packs, in the order given and as often as named."""
    starts, stops = packs.offsets[chosen], packs.offsets[chosen + 1]
    where = spread(starts, stops - starts)
    return Packs(
        tokens=packs.tokens,
        lengths=packs.lengths[where],
        offsets=np.append(0, np.cumsum(stops - starts)),
        samples=packs.samples[where],
        starts=packs.starts[where],
    )


def _draw(packs: int, wanted: int, source: np.random.Generator) -> IntArray:
    """Packs drawn at random, none more often than it must."""
    rounds = [source.permutation(packs) for _ in range(-(-wanted // packs))]
    return np.concatenate(rounds)[:wanted]


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _respread(parallelism: Parallelism, *, dp: int, global_batch: int) -> Parallelism | None:
    """The same with other replicas; None where they can't be spread so."""
    try:
        return replace(parallelism, dp=dp, global_batch=global_batch)
    except ValueError:
        return None
