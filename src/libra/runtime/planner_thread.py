"""The planner thread of a rank: plans ahead of the device while other microbatches are computed.

    worker 0        speeds -> plan_pool -> | broadcast | -> rank plan
    other workers   speeds                 | broadcast | -> rank plan

All ranks of a pool submit the same jobs in the same order, each to its one planner thread, so that
the broadcasts match.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.data.lengths import IntArray
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.pool_plan import fingerprint
from libra.plan.rank_plan import RankPlan, make_rank_plan
from libra.runtime.consensus import gather, reach_consensus
from libra.runtime.failure import finish, process_ends
from libra.runtime.process_groups import Membership
from libra.runtime.speed import SpeedMeter, relative_speeds

_LEAVE_SECONDS = 3.0

_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

logger = logging.getLogger(__name__)


class Planned(NamedTuple):
    """A plan and this worker's share of it."""

    plan: PoolPlan
    rank_plan: RankPlan


class Planner:
    """This rank's planner thread."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        membership: Membership,
        config: PoolConfig,
        meter: SpeedMeter | None = None,
    ) -> None:
        self._group = group
        self._membership = membership
        self._config = config
        self._meter = meter
        self._jobs: _Jobs = SimpleQueue()
        self._closed = False
        self.submitted = 0
        """Number of jobs so far, equal on all ranks that are in step."""
        # A daemon: a rank that fails elsewhere must not wait for a thread that waits for others.
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name="libra-planner", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        atexit.register(_leave, weakref.ref(self))

    def submit(
        self, cu_seqlens: Sequence[IntArray], tokens: int, heads: HeadShape
    ) -> Future[Planned]:
        """Start planning; the future raises the same error on every rank of the pool."""
        return self._submit(lambda: self._plan(tuple(cu_seqlens), tokens, heads))

    def catch_up(self, submitted: int) -> None:
        """Add refusals up to `submitted` jobs where other ranks have more; their jobs then fail."""
        while self.submitted < submitted:
            self._submit(lambda: reach_consensus(self._group, "no planning", None, {}))

    def shutdown(self) -> None:
        """Finish the jobs submitted so far and end the thread.

        Jobs that have not started are not cancelled: other ranks may have started theirs, and
        would wait for this rank.
        """
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        if self._closed:
            raise ValueError("the pool is closed; make a new SequencePool")
        self.submitted += 1
        future = Future[Any]()
        self._jobs.put((future, job))
        return future

    def _plan(self, cu_seqlens: tuple[IntArray, ...], tokens: int, heads: HeadShape) -> Planned:
        """The body of a job; collective over the pool's planner threads."""
        start, group, cp_size = time.perf_counter(), self._group, self._membership.cp_size
        # Step 1: all ranks agree on the microbatch, and share their measured speeds.
        digest = lengths_digest(cu_seqlens)
        facts = {"configuration": self._config, "heads": heads, "CP": cp_size, "tokens": tokens}
        reach_consensus(group, "planning", None, facts | {"lengths": f"{digest:x}"})
        speeds = None
        if self._meter is not None:
            speeds = relative_speeds(gather(group, torch.tensor(self._meter.reading)).numpy())

        # Step 2: worker 0 plans.
        plan, problem = None, None
        if self._membership.worker == 0:
            try:
                plan = plan_pool(
                    cu_seqlens,
                    cp_size=cp_size,
                    config=self._config,
                    heads=heads,
                    tokens=tokens,
                    speeds=speeds,
                )
            except Exception as error:  # of any type: all ranks have to raise it
                problem = str(error) or type(error).__name__
        reach_consensus(group, "plan made", problem, {})

        # Step 3: all workers receive the plan, and agree that it is this microbatch's.
        buffer = self._broadcast(None if plan is None else plan.to_buffer())
        received = {}
        try:
            plan = PoolPlan.from_buffer(buffer, self._config, heads) if plan is None else plan
            self._check(plan, tokens, digest)
            received["plan"] = f"{plan.digest():x}"
        except ValueError as error:  # a foreign or damaged buffer, or another microbatch's plan
            problem = str(error)
        reach_consensus(group, "plan received", problem, received)
        assert plan is not None
        planned = Planned(plan, make_rank_plan(plan, self._membership.worker))
        _log_plan(plan, time.perf_counter() - start)
        return planned

    def _check(self, plan: PoolPlan, tokens: int, digest: int) -> None:
        cp_size = self._membership.cp_size
        if (plan.tokens, plan.cp_size, lengths_digest(plan.cu_seqlens)) != (
            tokens,
            cp_size,
            digest,
        ):
            raise ValueError(
                f"the plan is for another microbatch: {plan.tokens} tokens at CP {plan.cp_size}, "
                f"not {tokens} at CP {cp_size}, or other sample lengths"
            )

    def _broadcast(self, buffer: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        """Worker 0's buffer; the other workers give None."""
        group = self._group
        size = torch.tensor([0 if buffer is None else len(buffer)])
        finish(dist.broadcast(size, group=group, group_src=0, async_op=True), group)
        data = torch.empty(int(size), dtype=torch.uint8) if buffer is None else torch.tensor(buffer)
        finish(dist.broadcast(data, group=group, group_src=0, async_op=True), group)
        return data.numpy()


def lengths_digest(cu_seqlens: Sequence[IntArray]) -> int:
    """63-bit fingerprint of a pool's sample bounds."""
    counts = np.array([len(cu) for cu in cu_seqlens], dtype=np.int64)
    return fingerprint(np.concatenate([counts, *cu_seqlens], dtype=np.int64).tobytes())


def _log_plan(plan: PoolPlan, seconds: float) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            f"plan of {plan.workers} workers ready in {1e3 * seconds:.1f} ms: imbalance "
            f"{plan.imbalance:.2%}, forward traffic {plan.traffic.sum()} bytes"
        )


def _work(jobs: _Jobs) -> None:
    while (submitted := jobs.get()) is not None:
        future, job = submitted
        try:
            future.set_result(job())
        except BaseException as error:  # raised in the thread that asks for the result
            future.set_exception(error)
        del submitted, future, job  # while the thread waits, nothing keeps the planner alive


def _leave(planner: weakref.ref[Planner]) -> None:
    """At the end of the process, end a thread that waits for other ranks."""
    if (left := planner()) is not None:
        process_ends.set()
        left._jobs.put(None)
        left._thread.join(_LEAVE_SECONDS)
