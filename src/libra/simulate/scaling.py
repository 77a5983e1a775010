"""Throughput against the number of replicas: one global batch for all, or as many packs a replica.

With a fixed batch more replicas leave fewer microbatches to each, and one heavy pack stalls more of
them; with weak scaling the largest of ever more packs does.  Pools are bounded, so both cost Libra
less and less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
Tick = Callable[[], None]

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
    """Throughput against replicas on one window of GBS packs, up to `most` replicas.

    `known` are schemes at the setting's own number of replicas, Ulysses among them.
    """
    steps = count(1)

    def tick() -> None:
        progress("scaling", next(steps), None)

    fixed = fixed_batch(packs, setting, schemes=_COMPARED, most=most, known=known, tick=tick)
    growing = weak(packs, setting, alone=known["ulysses"], most=most, seed=seed, tick=tick)
    return Scaling(fixed_batch=tuple(fixed), weak=tuple(growing))


def fixed_batch(
    packs: Packs,
    setting: Setting,
    *,
    schemes: Sequence[str] = PREDICTED,
    most: int = 1024,
    known: Mapping[str, WindowSeconds] | None = None,
    tick: Tick = lambda: None,
) -> list[ScalePoint]:
    """Replicas 1, 2, 4, ... up to `most` that divide the global batch of the setting, on one window
    of GBS packs.

    Attention seconds depend on the replicas through the size of pools only; `known` are those of
    some schemes at the setting's own.
    """
    batch = setting.parallelism.global_batch
    table: dict[tuple[str, int], WindowSeconds | None] = {
        (key, each.pool_size): each for key, each in (known or {}).items()
    }
    points = []
    for at in _respread(setting, min(most, batch), lambda dp: batch):
        rates = {}
        for key in schemes:
            # Equal pools are planned once, whatever the number of replicas.
            pools = key, SCHEMES[key].pool_size(setting.config.pool_size, at.parallelism.dp)
            if pools not in table:
                table[pools] = scheme_seconds(packs, at, key)
                tick()
            seconds = table[pools]
            if seconds is not None:
                rates[key] = seconds.step(at).tokens_per_second
        points.append(_point(at, rates))
    return points


def weak(
    packs: Packs,
    setting: Setting,
    *,
    alone: WindowSeconds | None = None,
    most: int = 1024,
    most_packs: int = 4096,
    seed: int = 0,
    tick: Tick = lambda: None,
) -> list[ScalePoint]:
    """Ulysses, Libra and ideal with 1, 2, 4, ... replicas, as many microbatches each as the setting
    has.

    A window of GA * dp packs is drawn from `packs`: without repetition, as long as there are
    enough.  Ends at `most` replicas or `most_packs` packs.  `alone` is Ulysses on every one of
    the packs, where it is known.
    """
    microbatches = setting.parallelism.microbatches
    # Ulysses takes packs one by one, so a drawn window needs no plans of its own.
    every_pack = alone or ulysses_seconds(packs, setting)
    source = np.random.default_rng(seed)
    points = []
    for at in _respread(
        setting, min(most, most_packs // microbatches), lambda dp: microbatches * dp
    ):
        drawn = _draw(len(packs), at.parallelism.global_batch, source)
        ulysses = every_pack.take(drawn)
        found = {
            "ulysses": ulysses,
            "ideal": ideal_seconds(ulysses, packs.tokens, at),
            "libra": scheme_seconds(select_packs(packs, drawn), at, "libra"),
        }
        tick()
        planned = {key: each for key, each in found.items() if each is not None}
        points.append(
            _point(at, {key: each.step(at).tokens_per_second for key, each in planned.items()})
        )
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


def _point(at: Setting, rates: Mapping[str, float]) -> ScalePoint:
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


def _respread(setting: Setting, most: int, batch: Callable[[int], int]) -> Iterator[Setting]:
    """The setting with 1, 2, 4, ... replicas up to `most`, where they can be spread so; `batch`
    gives the global batch of each number.
    """
    for dp in (1 << i for i in range(most.bit_length())):
        try:
            shape = replace(setting.parallelism, dp=dp, global_batch=batch(dp))
        except ValueError:
            continue
        yield replace(setting, parallelism=shape)
