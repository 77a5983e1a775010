"""Many ranks in one process: each is a thread, and a collective copies between their tensors.

    def test_sixteen_ranks_sum():
        assert threaded_ranks(16, case) == [120] * 16     # case(rank, world_size), may be a closure

Quicker than processes and free in number, but an operation completes when it is issued: use-before-
wait faults and overlap do not show, there is no point-to-point, and the ranks share one random
generator (pass `torch.Generator`s).  A thread that a rank starts sees the groups of that rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.distributed.outcomes import Lost, Outcome, Raised, Returned, settle


def threaded_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    grace: float = 5.0,
    expect_error: bool = False,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank, each a thread; the results by rank.

    With `expect_error` every rank must raise; returns each rank's `TypeName: message`.  After the
    first error the other ranks have `grace` seconds.  Raises RankError with every failing rank's
    traceback, or the stacks of the ranks that did not answer within `timeout` seconds.
    """
    outcomes: list[Outcome | None] = [None] * world_size
    failed = threading.Event()

    def rank_thread(rank: int, store: dist.Store) -> None:
        outcome: Outcome | None = None
        try:
            torch.set_num_threads(1)
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            try:
                outcome = Returned(fn(rank, world_size, *args))
            finally:
                dist.destroy_process_group()
        except SystemExit:  # how a rank leaves a collective that we broke off
            outcome = None
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            outcome = Raised(f"{type(error).__name__}: {error}", text)
            failed.set()
        outcomes[rank] = outcome

    with _threaded_world(), _children_inherit_groups():
        store = dist.HashStore()
        threads = [
            threading.Thread(target=rank_thread, args=(rank, store), name=f"rank {rank}")
            for rank in range(world_size)
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        limit = _join(threads, failed, timeout, grace)
        stuck = {rank: _stack(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
        if stuck:
            _break_off([threads[rank] for rank in stuck])
    # A rank that answered after all while we broke off still counts as stuck.
    told = [
        Lost(f"no answer {limit}.  Its stack:", stuck[rank])
        if rank in stuck
        else outcome or Lost("broken off", "")
        for rank, outcome in enumerate(outcomes)
    ]
    case = getattr(fn, "__qualname__", repr(fn))
    return settle(told, expect_error=expect_error, case=case)


def _join(
    threads: list[threading.Thread], failed: threading.Event, timeout: float, grace: float
) -> str:
    """Wait for the threads; returns the limit that applied, in words."""
    deadline, limit = time.monotonic() + timeout, f"within {timeout:g} s"
    shortened = False
    while any(thread.is_alive() for thread in threads):
        now = time.monotonic()
        if failed.is_set() and not shortened:
            shortened = True
            if now + grace < deadline:
                deadline, limit = now + grace, f"within {grace:g} s of the first failure"
        if now >= deadline:
            break
        next(thread for thread in threads if thread.is_alive()).join(min(0.05, deadline - now))
    return limit


def _break_off(threads: list[threading.Thread]) -> None:
    """End stuck ranks: wake those in a collective, raise SystemExit in the others."""
    group = threaded.ProcessLocalGroup
    group._terminate.set()
    with group._coll_lock:
        collectives = list(group._cur_coll_on_pgs.values())
    for collective in collectives:
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()
    for thread in threads:
        thread.join(1.0)
        if thread.is_alive() and thread.ident is not None:
            # Takes effect when the thread is next in Python code: it can't disturb a later case.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )
            thread.join(1.0)


@contextlib.contextmanager
def _threaded_world() -> Iterator[None]:
    """Process groups, and the registry of their names, are each thread's own in this context."""
    group, hook = threaded.ProcessLocalGroup, sys.excepthook
    name = group.pg_name
    group.pg_name = property(_name_also_after_destruction)
    c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        group.pg_name, sys.excepthook = name, hook  # init_process_group wraps the hook each time
        group.reset()
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)


def _name_also_after_destruction(group: Any) -> str:
    """torch asks a subgroup's name once more after forgetting it."""
    group.known_name = group._world().pg_names.get(group, getattr(group, "known_name", ""))
    return str(group.known_name)


@contextlib.contextmanager
def _children_inherit_groups() -> Iterator[None]:
    """Threads started by a rank's thread, such as a planner's, belong to that rank."""
    start, local = threading.Thread.start, threaded.ThreadLocalWorld._world

    def start_inheriting(thread: threading.Thread) -> None:
        world, run = getattr(local, "world", None), thread.run
        if world is not None and world.default_pg is not None:

            def run_inheriting() -> None:
                local.world = world
                for group, name in list(world.pg_names.items()):
                    c10d._register_process_group(name, group)
                run()

            thread.run = run_inheriting
        start(thread)

    threading.Thread.start = start_inheriting
    try:
        yield
    finally:
        threading.Thread.start = start


def _stack(thread: threading.Thread) -> str:
    """Where the thread is in the case and in torch's public functions, without the harness."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = list(traceback.extract_stack(frame) if frame else [])
    inside = itertools.dropwhile(lambda entry: entry.name != "rank_thread", frames)
    case = itertools.takewhile(lambda entry: entry.filename != threaded.__file__, inside)
    return "".join(traceback.format_list(list(case)[1:]))
