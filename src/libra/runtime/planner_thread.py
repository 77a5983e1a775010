"""The coordinator plans on its own CPU thread, ahead of the device; every worker receives the plan
as one flat buffer.

All ranks of a pool submit the same jobs in the same order, each to its one planner thread, so the
broadcasts line up.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.rank_plan import RankPlan, make_rank_plan
from libra.plan.wire import fingerprint
from libra.runtime.consensus import reach_consensus
from libra.runtime.failure import finish
from libra.runtime.speed import SpeedMeter, relative_speeds

IntArray = NDArray[np.int64]

_LEAVE_SECONDS = 3.0

_Result = TypeVar("_Result")
_Jobs = SimpleQueue[Callable[[], None] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan and this worker's rank_plan through it."""

    plan: PoolPlan
    rank_plan: RankPlan


class Planner:
    """This rank's planner thread."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        worker: int,
        cp_size: int,
        config: PoolConfig,
        meter: SpeedMeter | None = None,
    ) -> None:
        self._meter = meter
        self._group = group
        self._worker = worker
        self._cp_size = cp_size
        self._config = config
        self._jobs: _Jobs = SimpleQueue()
        self._leaving = threading.Event()
        self._closed = False
        self.submitted = 0
        """Jobs so far, the same on every rank that is in step."""
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
        """Fill up to `submitted` jobs where other ranks have more; theirs then end as refused."""
        while self.submitted < submitted:
            self._submit(
                lambda: reach_consensus(self._group, "no planning", None, {}, self._leaving)
            )

    def _submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        if self._closed:
            raise ValueError("the pool is closed; make a new SequencePool")
        self.submitted += 1
        future: Future[_Result] = Future()
        self._jobs.put(lambda: _fulfil(future, job))
        return future

    def shutdown(self) -> None:
        """Finish the jobs submitted so far and let the thread end.

        Cancelling those that have not started would leave a rank whose thread is further ahead
        waiting for the others.
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _plan(self, cu_seqlens: tuple[IntArray, ...], tokens: int, heads: HeadShape) -> Planned:
        reach_consensus(
            self._group,
            "planning",
            None,
            {
                "configuration": self._config,
                "heads": heads,
                "CP": self._cp_size,
                "tokens": tokens,
                "lengths": f"{lengths_digest(cu_seqlens):x}",
            },
            self._leaving,
        )
        speeds = None if self._meter is None else relative_speeds(self._readings(self._meter))
        plan, problem = None, None
        if self._worker == 0:
            try:
                plan = plan_pool(
                    cu_seqlens,
                    cp_size=self._cp_size,
                    config=self._config,
                    heads=heads,
                    tokens=tokens,
                    speeds=speeds,
                )
            except Exception as error:  # whatever it is, the others must hear of it
                problem = str(error) or type(error).__name__
        reach_consensus(self._group, "plan made", problem, {}, self._leaving)
        buffer = self._broadcast(None if plan is None else plan.to_buffer())
        facts = {}
        try:
            plan = PoolPlan.from_buffer(buffer, self._config, heads) if plan is None else plan
            self._check(plan, cu_seqlens, tokens)
            facts = {"plan": f"{plan.digest():x}"}
        except ValueError as error:  # a foreign or damaged buffer, or another microbatch's plan
            problem = str(error)
        reach_consensus(self._group, "plan received", problem, facts, self._leaving)
        assert plan is not None
        return Planned(plan, make_rank_plan(plan, self._worker))

    def _check(self, plan: PoolPlan, cu_seqlens: tuple[IntArray, ...], tokens: int) -> None:
        wanted = (tokens, self._cp_size, lengths_digest(cu_seqlens))
        if (plan.tokens, plan.cp_size, lengths_digest(plan.cu_seqlens)) != wanted:
            raise ValueError(
                f"the plan is for another microbatch: {plan.tokens} tokens at CP {plan.cp_size}, not "
                f"{tokens} at CP {self._cp_size}, or other sample lengths"
            )

    def _readings(self, meter: SpeedMeter) -> IntArray:
        """Every worker's measured speed, int64 [workers]."""
        mine = torch.tensor([meter.reading])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        self._finish(dist.all_gather(every, mine, group=self._group, async_op=True))
        return torch.cat(every).numpy()

    def _broadcast(self, buffer: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        size = torch.tensor([0 if buffer is None else len(buffer)])
        self._finish(dist.broadcast(size, group=self._group, group_src=0, async_op=True))
        data = torch.empty(int(size), dtype=torch.uint8)
        if buffer is not None:
            data.copy_(torch.tensor(buffer))
        self._finish(dist.broadcast(data, group=self._group, group_src=0, async_op=True))
        return data.numpy()

    def _finish(self, work: dist.Work | None) -> None:
        assert work is not None
        finish(work, self._group, self._leaving)


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()


def _fulfil(future: Future[_Result], job: Callable[[], _Result]) -> None:
    try:
        result = job()
    except BaseException as error:  # the thread that asks for the result shall have it
        future.set_exception(error)
    else:
        future.set_result(result)


def _leave(planner: weakref.ref[Planner]) -> None:
    """At the process's end: a thread that waits for other ranks stops waiting."""
    if (left := planner()) is not None:
        left._leaving.set()
        left._jobs.put(None)
        left._thread.join(_LEAVE_SECONDS)


def lengths_digest(cu_seqlens: Sequence[IntArray]) -> int:
    """63-bit fingerprint of a pool's sample bounds."""
    counts = np.array([len(cu) for cu in cu_seqlens], dtype=np.int64)
    return fingerprint(np.concatenate([counts, *cu_seqlens], dtype=np.int64).tobytes())
