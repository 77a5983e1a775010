"""Real ranks for tests: N gloo processes, started once and kept alive between cases.

    def case(rank, world_size, shift):          # at module level, so that it can be pickled
        x = torch.tensor([rank + shift])
        dist.all_reduce(x)
        return x.item()

    def test_sums(ranks4):
        assert ranks4.run(case, 1) == [10, 10, 10, 10]

A case never hangs: past `timeout` every rank is killed, the test fails with the stacks of the
ranks that did not answer, and the next case starts new ranks.  Starting costs seconds (torch is
imported once, in a fork server, then forked); a case costs under a millisecond.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from tests.distributed import rank_process
from tests.distributed.outcomes import Lost, Outcome, Raised, RankError, settle

START_SECONDS = 120.0
# What every rank would import anyway; torch._dynamo alone, which the first operator call wants,
# takes seconds.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.testing",
    "torch._dynamo",
    "numba",
    "pytest",
    "hypothesis",
    "libra.runtime.pool",
    "libra.runtime.kernels.cpu",
    "libra.plan.place_paper",
    "libra.plan.place_surplus",
]


@dataclass(frozen=True, slots=True)
class _Rank:
    process: ForkServerProcess
    connection: Connection
    log: Path


class RankPool:
    """`world_size` processes in one default gloo group.  Groups and module state that a case makes
    persist until the pool restarts, which it does after every case that failed."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._logs = Path(tempfile.mkdtemp(prefix="libra-ranks-"))

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        grace: float = 10.0,
        expect_error: bool = False,
    ) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank; the results by rank.

        With `expect_error` every rank must raise; returns each rank's `TypeName: message`.  After
        the first error the other ranks have `grace` seconds: they may be stuck in a collective.
        Raises RankError with every failing rank's traceback.  `torch.manual_seed(0)` precedes.
        """
        return self.run_each(
            fn, [args] * self.world_size, timeout=timeout, grace=grace, expect_error=expect_error
        )

    def run_each(
        self,
        fn: Callable[..., Any],
        args_per_rank: Sequence[Sequence[Any]],
        *,
        timeout: float = 60.0,
        grace: float = 10.0,
        expect_error: bool = False,
    ) -> list[Any]:
        """As `run`, with `args_per_rank[rank]` for each rank."""
        if len(args_per_rank) != self.world_size:
            raise ValueError(f"{len(args_per_rank)} argument lists for {self.world_size} ranks")
        messages = [pickle.dumps((fn, tuple(args))) for args in args_per_rank]
        if not self._ranks:
            self._start()
        healthy = False
        try:
            outcomes = self._exchange(messages, timeout, grace)
            results = settle(outcomes, expect_error=expect_error, case=fn.__qualname__)
            healthy = not expect_error or self._in_step()
        finally:
            if not healthy:
                self._kill()
        return results

    def close(self) -> None:
        """End every rank.  The pool may be used again and then starts new ones."""
        self._kill()
        shutil.rmtree(self._logs, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._logs.mkdir(exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        # The parent holds the store on a port that the system chose: no race for a free one.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                log = self._logs / f"rank{rank}.log"
                log.write_bytes(b"")
                process = context.Process(
                    target=rank_process.serve,
                    args=(rank, self.world_size, self._store.port, theirs, str(log)),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours, log))
            outcomes = self._collect([0] * self.world_size, START_SECONDS, START_SECONDS)
            settle(outcomes, expect_error=False, case="starting ranks")
        except BaseException:
            self._kill()
            raise

    def _exchange(self, messages: list[bytes], timeout: float, grace: float) -> list[Outcome]:
        offsets = [rank.log.stat().st_size for rank in self._ranks]
        for rank, message in zip(self._ranks, messages, strict=True):
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported on reading
                rank.connection.send_bytes(message)
        return self._collect(offsets, timeout, grace)

    def _collect(self, offsets: list[int], timeout: float, grace: float) -> list[Outcome]:
        """One outcome per rank; waits at most `timeout`, or `grace` after the first failure."""
        outcomes: dict[int, Outcome] = {}
        waiting = {rank.connection: index for index, rank in enumerate(self._ranks)}
        limit = f"within {timeout:g} s"
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                index = waiting.pop(connection)
                outcomes[index] = self._receive(index, offsets[index])
                until = time.monotonic() + grace
                if isinstance(outcomes[index], Raised | Lost) and until < deadline:
                    deadline, limit = until, f"within {grace:g} s of the first failure"
        stuck = sorted(waiting.values())
        for index, stacks in zip(stuck, self._stacks(stuck), strict=True):
            outcomes[index] = Lost(f"no answer {limit}; killed.  Its stacks:", stacks)
        return [outcomes[index] for index in range(self.world_size)]

    def _receive(self, index: int, offset: int) -> Outcome:
        rank = self._ranks[index]
        try:
            message = rank.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            rank.process.join(5.0)
            return Lost(f"the process ended: {_ending(rank.process)}", _said(rank.log, offset))
        try:
            outcome: Outcome = pickle.loads(message)
        except Exception as error:
            text = f"the result of rank {index} cannot be read: {type(error).__name__}: {error}"
            return Raised(text, text)
        return outcome

    def _stacks(self, indices: list[int]) -> list[str]:
        """Python stacks of all threads of these ranks, asked for by signal."""
        offsets = [self._ranks[index].log.stat().st_size for index in indices]
        for index in indices:
            pid = self._ranks[index].process.pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        if indices:
            time.sleep(0.5)
        return [
            _said(self._ranks[index].log, offset)
            for index, offset in zip(indices, offsets, strict=True)
        ]

    def _in_step(self) -> bool:
        """Whether, after an expected error, no rank is a collective ahead in any group."""
        message = pickle.dumps((_barrier_on_every_group, ()))
        outcomes = self._exchange([message] * self.world_size, timeout=10.0, grace=0.1)
        try:
            settle(outcomes, expect_error=False, case="barrier after an error")
        except RankError:
            return False
        return True

    def _kill(self) -> None:
        ranks, self._ranks, self._store = self._ranks, [], None
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join(10.0)
            rank.connection.close()


def _barrier_on_every_group(rank: int, world_size: int) -> None:
    groups = sorted(dist.distributed_c10d._world.pg_names.items(), key=lambda item: item[1])
    # All are posted before the first wait: groups overlap, and ranks may hold different ones.
    for work in [dist.barrier(group=group, async_op=True) for group, _ in groups]:
        work.wait(timedelta(seconds=2))


def _ending(process: ForkServerProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _said(log: Path, offset: int) -> str:
    """What a rank wrote to its log after `offset` bytes, without the stacks of the harness."""
    text = log.read_bytes()[offset:].decode(errors="replace")
    kept = []
    for section in text.split("\n\n"):
        if "_end_with_parent" in section or section.startswith("Extension modules:"):
            continue
        kept.append(section.partition('  File "' + rank_process.__file__)[0].rstrip())
    return "\n".join(kept)[-8000:]
