"""Rank pools of these tests: started by the first that asks, closed behind the last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import libra
from tests.distributed.ranks import RankPool


@pytest.fixture(scope="package")
def compiled() -> None:
    """The planner's code, compiled once for all processes: several at a time are slow at it."""
    for placement in ("surplus", "paper"):
        config = libra.PoolConfig(pool_size=2, block_size=8, placement=placement)
        heads = libra.HeadShape(4, 2, 8)
        libra.plan_pool([[0, 64], [0, 32, 64]], cp_size=1, config=config, heads=heads)


@pytest.fixture(scope="package")
def ranks2(compiled: None) -> Iterator[RankPool]:
    """Two gloo processes, kept alive between cases."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="package")
def ranks4(compiled: None) -> Iterator[RankPool]:
    """Four gloo processes, kept alive between cases."""
    with RankPool(4) as pool:
        yield pool
