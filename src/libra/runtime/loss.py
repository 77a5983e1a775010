"""Naming the rank that was lost, when a collective of the pool fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

_GRACE_SECONDS = 5.0


@contextmanager
def naming_lost_ranks(stage: str, ranks: Sequence[int], key: str) -> Iterator[None]:
    """Turn a failed collective into a RuntimeError that names the pool's ranks that no longer
    answer.

    Each survivor signs in at the job's store under `key` and looks, for a few seconds, who else
    did.
    """
    try:
        yield
    except RuntimeError as error:  # what torch.distributed raises, DistBackendError included
        missing = _silent(ranks, key)
        named = (
            f"rank {', '.join(map(str, missing))} no longer answers"
            if missing
            else "all ranks still answer"
        )
        raise RuntimeError(
            f"{stage} failed in the pool of ranks {list(ranks)}: {named} ({error})"
        ) from error


def _silent(ranks: Sequence[int], key: str) -> list[int]:
    """Ranks that did not sign in; the store's host counts as lost where the store itself is
    gone.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{dist.get_rank()}", "here")
        missing = list(ranks)
        until = time.monotonic() + _GRACE_SECONDS
        while missing and time.monotonic() < until:
            missing = [rank for rank in missing if not store.check([f"{key}/{rank}"])]
            if missing:
                time.sleep(0.1)
        return missing
    except (RuntimeError, dist.DistError):
        return [0] if 0 in ranks else []
