"""Samplers over a small long-tailed corpus, for the tests of sampling and resuming."""

from __future__ import annotations

from typing import Any

import numpy as np

from libra.data.packing import Packs, pack_sequential
from libra.data.sampler import PoolSampler

GBS = 16
PLAIN: dict[str, Any] = {"refine": False, "order": "index"}  # the paper's VRSP and no more


def corpus(samples: int = 500, seed: int = 0) -> Packs:
    """96 or so packs with a few heavy ones."""
    lengths = np.random.default_rng(seed).lognormal(5, 1.3, samples).astype(np.int64) + 1
    return pack_sequential(lengths, 1024, longer="cut")


def whole_windows(windows: int = 6) -> list[np.ndarray]:
    """Packs that fill windows exactly."""
    return list(corpus())[: windows * GBS]


def make(**changes: Any) -> PoolSampler:
    """A sampler of six whole windows, DP 4, P 2, rank 0 but for the changes."""
    settings: dict[str, Any] = {
        "lengths_of_packs": whole_windows(),
        "global_batch": GBS,
        "dp_rank": 0,
        "dp_size": 4,
        "pool_size": 2,
        "seed": 7,
    }
    settings.update(changes)
    return PoolSampler(settings.pop("lengths_of_packs"), **settings)


def ranks(**changes: Any) -> list[PoolSampler]:
    return [make(dp_rank=rank, **changes) for rank in range(changes.get("dp_size", 4))]


def windows_of(schedule: np.ndarray) -> list[list[int]]:
    """Sorted packs of each optimizer step of a schedule [steps, dp_size]."""
    return np.sort(schedule.reshape(-1, GBS), axis=1).tolist()
