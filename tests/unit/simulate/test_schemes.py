"""The table of schemes: sizes, pools and configurations that follow from a row."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

import libra
from libra.data.pools import make_pools
from libra.simulate.schemes import MEASURED, PREDICTED, SCHEMES, SchemeKey

CONFIG = libra.PoolConfig(pool_size=2, chunks=2)
WORKLOADS = np.array([1, 2, 3, 4, 5, 6, 7, 80])


def test_every_key_has_one_row_and_simulator_and_benchmark_take_theirs() -> None:
    assert tuple(SCHEMES) == get_args(SchemeKey)
    assert set(SCHEMES) - set(PREDICTED) == {"ring"}
    assert set(SCHEMES) - set(MEASURED) == {"ideal"}
    assert len({scheme.label for scheme in SCHEMES.values()}) == len(SCHEMES)


@pytest.mark.parametrize(
    "key, size, chunks, placement",
    [
        ("ulysses", 1, 1, "ulysses"),
        ("ring", 1, 1, "surplus"),
        ("wlb", 1, 1, "ulysses"),
        ("cluster", 8, 2, "surplus"),
        ("tap", 2, 1, "surplus"),
        ("tap_vrsp", 2, 1, "surplus"),
        ("libra", 2, 2, "surplus"),
    ],
)
def test_a_scheme_has_its_pool_size_and_chunks(
    key: str, size: int, chunks: int, placement: str
) -> None:
    config = SCHEMES[key].pool_config(CONFIG, dp_size=8)
    assert (config.pool_size, config.chunks, config.placement) == (size, chunks, placement)
    assert SCHEMES[key].pool_size(CONFIG.pool_size, 8) == size


def test_a_pool_is_no_larger_than_the_job() -> None:
    config = libra.PoolConfig(pool_size=8)
    assert SCHEMES["libra"].pool_config(config, dp_size=2).pool_size == 2


def test_only_vrsp_schemes_move_packs_between_pools() -> None:
    in_order = np.arange(8).reshape(4, 2)
    for key in ("ulysses", "cluster", "tap"):
        assert SCHEMES[key].pools(WORKLOADS, 2, 2).tolist() == in_order.tolist()
    vrsp, libra_pools = (SCHEMES[key].pools(WORKLOADS, 2, 2) for key in ("tap_vrsp", "libra"))
    assert vrsp.tolist() == libra.place_packs(WORKLOADS, 2).tolist()
    assert libra_pools.tolist() == make_pools(WORKLOADS, 2, 2).tolist()
