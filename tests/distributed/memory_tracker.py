"""The peak of PyTorch's own CPU allocations, from the allocator's reports to the profiler."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch.autograd.profiler import profile


@dataclass
class Peak:
    """What a block took."""

    nbytes: int = 0
    """Most bytes at any time beyond those at its start."""


@contextlib.contextmanager
def tracked() -> Iterator[Peak]:
    """Track every allocation and release of this process; the figure is there after the block."""
    peak = Peak()
    gc.collect()  # what an earlier case left in cycles
    with profile(use_cpu=True, use_kineto=True, profile_memory=True) as seen:
        yield peak
    changes = [event for event in seen.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    peak.nbytes = max(itertools.accumulate((event.nbytes() for event in changes), initial=0))
