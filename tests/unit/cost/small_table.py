"""A kernel table of two points along every axis."""

from __future__ import annotations

import numpy as np

from libra.cost import KernelTable


def table(**changes: object) -> KernelTable:
    """Two points along every axis; fractions 1/2, 1/4, ... by q, k and heads."""
    shape = (2, 2, 2)
    fields = {
        "source": "a test",
        "peak_flops": 1000.0,
        "key_dim": 2,
        "value_dim": 3,
        "q_len": np.array([16, 256]),
        "k_per_q": np.array([1.0, 4.0]),
        "heads": np.array([1, 4]),
        "forward": 0.5 ** np.arange(1, 9).reshape(shape),
        "backward": np.full(shape, 0.25),
    }
    return KernelTable(**(fields | changes))  # type: ignore[arg-type]
