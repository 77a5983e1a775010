"""Rank pools of these tests: started by the first that asks, closed behind the last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import RankPool


@pytest.fixture(scope="package")
def ranks2() -> Iterator[RankPool]:
    """Two gloo processes, kept alive between cases."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="package")
def ranks4() -> Iterator[RankPool]:
    """Four gloo processes, kept alive between cases."""
    with RankPool(4) as pool:
        yield pool
