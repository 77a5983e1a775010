"""Naming the rank that was lost, when a collective of the pool fails.

A dead process closes its connections, which wakes the ranks that were talking to it.  A ring leaves
others waiting for neighbours that live.  So the first rank to notice calls the roll at the job's
store, and ranks that wait look there once a second: all of them answer, the lost one doesn't.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

_LOOK = timedelta(seconds=1)
_GRACE_SECONDS = 5.0


class BrokenGroupError(RuntimeError):
    """An operation of a process group failed: its ranks cannot go on together."""


def finish(
    work: dist.Work, group: dist.ProcessGroup, leaving: threading.Event | None = None
) -> None:
    """Wait for an operation on a CPU group.

    Raises BrokenGroupError if it fails, if another rank of the group met a failure meanwhile, or
    once `leaving` is set.
    """
    while not work.is_completed():
        try:
            work.wait(_LOOK)
        except RuntimeError:
            if work.is_completed():
                break
            if leaving is not None and leaving.is_set():
                raise BrokenGroupError("this rank is ending") from None
            if _called(dist.get_process_group_ranks(group)):
                raise BrokenGroupError("another rank of the pool met the failure") from None
    try:
        work.wait()
    except RuntimeError as error:
        raise BrokenGroupError(str(error)) from error


@contextmanager
def naming_lost_ranks(stage: str, ranks: Sequence[int]) -> Iterator[None]:
    """Turn a broken group into a RuntimeError that names the pool's ranks that no longer answer."""
    try:
        yield
    except (BrokenGroupError, dist.DistBackendError) as error:
        missing = _call_the_roll(ranks)
        if missing is None:
            named = "the job's store does not answer, its host is lost"
            if 0 in ranks:
                named = f"rank 0 no longer answers ({named})"
        elif missing:
            named = f"rank {', '.join(map(str, missing))} no longer answers"
        else:
            named = "all ranks still answer"
        raise RuntimeError(
            f"{stage} failed in the pool of ranks {list(ranks)}: {named} ({error})"
        ) from error


def _roll(ranks: Sequence[int]) -> str:
    return f"libra/lost/{ranks[0]}"


def _called(ranks: Sequence[int]) -> bool:
    try:
        return dist.distributed_c10d._get_default_store().check([f"{_roll(ranks)}/called"])
    except RuntimeError:  # the store's host may have ended its own work: no news
        return False


def _call_the_roll(ranks: Sequence[int]) -> list[int] | None:
    """Ranks that don't sign in within the grace; None where the store is gone from the start."""
    missing: list[int] | None = None
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_roll(ranks)}/{dist.get_rank()}", "here")
        store.set(f"{_roll(ranks)}/called", "")
        until = time.monotonic() + _GRACE_SECONDS
        while missing != [] and time.monotonic() < until:
            missing = [rank for rank in ranks if not store.check([f"{_roll(ranks)}/{rank}"])]
            time.sleep(0.1)
    except RuntimeError:
        pass  # its host has left before us: what we saw last stands
    return missing
