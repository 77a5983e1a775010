"""Named stages of a layer, for profilers to show."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch.profiler import record_function

_UNSEEN: Final = nullcontext()


def stage(name: str) -> AbstractContextManager[object]:
    """A stage `libra::{name}`.  While no profiler runs it is nothing: a range costs 20 us then."""
    # torch's own optimizers ask the same flag; without it every stage is recorded.
    seen = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(f"libra::{name}") if seen else _UNSEEN
