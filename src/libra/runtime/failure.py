"""Naming the lost rank when a collective of the pool fails.

A dead process closes its connections, which wakes the ranks that were receiving from it.  In a ring
other ranks keep waiting for neighbours that are alive.  So the first rank that fails opens a roll
call at the job's store, and ranks that wait look for one once a second: every rank that is alive
signs in, the lost rank does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from libra.runtime.torch_private import default_store

_POLL = timedelta(seconds=1)
_GRACE_SECONDS = 5.0

process_ends: Final = threading.Event()
"""Set at the end of this process: its threads then stop waiting for other ranks."""


class BrokenGroupError(RuntimeError):
    """An operation of a process group failed: its ranks cannot go on together."""


def finish(work: dist.Work | None, group: dist.ProcessGroup) -> None:
    """Wait for an operation on a CPU group.

    Raises BrokenGroupError if the operation fails, if another rank of the group has opened a roll
    call, or once `process_ends` is set.
    """
    assert work is not None, "this rank is not in the group"
    while not work.is_completed():
        try:
            work.wait(_POLL)
        except RuntimeError:  # the poll is over, or the operation has failed
            if work.is_completed():
                break
            if process_ends.is_set():
                raise BrokenGroupError("this rank is ending") from None
            if _is_called(dist.get_process_group_ranks(group)):
                raise BrokenGroupError("another rank of the pool has seen the failure") from None
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
        missing = _call_roll(ranks)
        named = "all ranks still answer"
        if missing:
            named = f"rank {', '.join(map(str, missing))} no longer answers"
        elif missing is None:
            named = "the job's store does not answer, its host is lost"
            named = f"rank 0 no longer answers ({named})" if 0 in ranks else named
        raise RuntimeError(
            f"{stage} failed in the pool of ranks {list(ranks)}: {named} ({error})"
        ) from error


def _roll(ranks: Sequence[int]) -> str:
    return f"libra/lost/{ranks[0]}"


def _is_called(ranks: Sequence[int]) -> bool:
    try:
        return bool(default_store().check([f"{_roll(ranks)}/called"]))
    except RuntimeError:  # the store's host may have ended its own work: no failure is known
        return False


def _call_roll(ranks: Sequence[int]) -> list[int] | None:
    """Ranks that do not sign in within the grace; None if the store never answered."""
    missing: list[int] | None = None
    try:
        # Step 1: sign in, then call the others.
        store = default_store()
        store.set(f"{_roll(ranks)}/{dist.get_rank()}", "here")
        store.set(f"{_roll(ranks)}/called", "")
        # Step 2: look who has signed in, until all have or the grace is over.
        until = time.monotonic() + _GRACE_SECONDS
        while missing != [] and time.monotonic() < until:
            missing = [rank for rank in ranks if not store.check([f"{_roll(ranks)}/{rank}"])]
            time.sleep(0.1)
    except RuntimeError:
        pass  # the store's host ended before this rank: the ranks missing by then stand
    return missing
