"""Rank pools of the test session: started by the first test that asks, closed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import RankPool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two gloo processes, kept alive between cases."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four gloo processes, kept alive between cases."""
    with RankPool(4) as pool:
        yield pool
