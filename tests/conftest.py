"""Settings that every test shares."""

from __future__ import annotations

import os

# Before torch is imported anywhere: ranks are processes and threads that share few cores.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Cases that reach ranks have no steady duration, and a failure must repeat itself on the next run.
settings.register_profile(
    "libra",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("libra")


@pytest.fixture
def short_multicasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans made and used in this process may multicast runs of any length."""
    from libra.plan import kv_multicast

    monkeypatch.setattr(kv_multicast, "FEWEST_ROWS", 1)


@pytest.fixture
def eager_multicasts(short_multicasts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And multicast them whether or not that relieves any worker."""
    from libra.plan import pool_plan

    monkeypatch.setattr(pool_plan, "relieves", lambda direct, multicast, per_node: True)
