"""Throughput against the number of replicas: one global batch for all, or as many packs a replica.

With a fixed batch more replicas leave fewer microbatches to each, and one heavy pack stalls more of
them; with weak scaling the largest of ever more packs does.  Pools are bounded, so both cost Libra
less and less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libra.data.packing import Packs
from libra.plan.geometry import spread
from libra.simulate.compare import Progress
from libra.simulate.predict import Setting, WindowSeconds, ideal_seconds, scheme_seconds
from libra.simulate.results import ScalePoint, Scaling
from libra.simulate.schemes import SCHEMES

IntArray = NDArray[np.int64]

_COMPARED: Final = ("ulysses", "cluster", "libra", "ideal")
"""Schemes whose throughput is predicted for every number of replicas of a fixed batch."""
_MOST_PACKS: Final = 4096
"""Packs of the largest window that is drawn."""


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
    batch = setting.parallelism.global_batch
    table: dict[tuple[str, int], WindowSeconds | None] = {
        (key, each.pool_size): each for key, each in known.items()
    }
    for at in _respread(setting, dict.fromkeys(_powers(min(most, batch)), batch)):
        found = {}
        for key in _COMPARED:
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
    microbatches = setting.parallelism.microbatches
    source = np.random.default_rng(seed)
    replicas = _powers(min(most, _MOST_PACKS // microbatches))
    for at in _respread(setting, {dp: microbatches * dp for dp in replicas}):
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
    starts, stops = packs.offsets[chosen], packs.offsets[chosen + 1]
    where = spread(starts, stops - starts)
    return Packs(
        tokens=packs.tokens,
        lengths=packs.lengths[where],
        offsets=np.append(0, np.cumsum(stops - starts)),
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
    rounds = [source.permutation(packs) for _ in range(-(-wanted // packs))]
    return np.concatenate(rounds)[:wanted]


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length())]


def _respread(setting: Setting, batches: Mapping[int, int]) -> Iterator[Setting]:
    """The setting with each number of replicas and its global batch, where it can be spread so."""
    for dp, batch in batches.items():
        try:
            shape = replace(setting.parallelism, dp=dp, global_batch=batch)
        except ValueError:
            continue
        yield replace(setting, parallelism=shape)
