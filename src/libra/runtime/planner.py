"""The coordinator plans on its own CPU thread, ahead of the device; every worker receives the plan
as one flat buffer.

All ranks of a pool submit the same jobs in the same order, each to its one planner thread, so the
broadcasts line up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.plan import PoolPlan, plan_pool
from libra.plan.route import Route, worker_route
from libra.runtime.agreement import agree

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan and this worker's route through it."""

    plan: PoolPlan
    route: Route


class Planner:
    """This rank's planner thread."""

    def __init__(
        self, group: dist.ProcessGroup, worker: int, cp_size: int, config: PoolConfig
    ) -> None:
        self._group = group
        self._worker = worker
        self._cp_size = cp_size
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="libra-planner")

    def submit(
        self, cu_seqlens: Sequence[IntArray], tokens: int, heads: HeadShape
    ) -> Future[Planned]:
        """Start planning; the future raises the same error on every rank of the pool."""
        return self._thread.submit(self._plan, tuple(cu_seqlens), tokens, heads)

    def shutdown(self) -> None:
        """Forget jobs that have not started and let the thread end."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _plan(self, cu_seqlens: tuple[IntArray, ...], tokens: int, heads: HeadShape) -> Planned:
        agree(
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
        )
        plan, problem = None, None
        if self._worker == 0:
            try:
                plan = plan_pool(
                    cu_seqlens,
                    cp_size=self._cp_size,
                    config=self._config,
                    heads=heads,
                    tokens=tokens,
                )
            except Exception as error:  # whatever it is, the others must hear of it
                problem = str(error) or type(error).__name__
        agree(self._group, "plan made", problem, {})
        buffer = self._broadcast(None if plan is None else plan.to_buffer())
        if plan is None:
            plan = PoolPlan.from_buffer(buffer, self._config, heads)
        agree(self._group, "plan received", None, {"plan": f"{plan.digest():x}"})
        return Planned(plan, worker_route(plan, self._worker))

    def _broadcast(self, buffer: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        size = torch.tensor([0 if buffer is None else len(buffer)])
        dist.broadcast(size, group=self._group, group_src=0)
        data = torch.empty(int(size), dtype=torch.uint8)
        if buffer is not None:
            data.copy_(torch.tensor(buffer))
        dist.broadcast(data, group=self._group, group_src=0)
        return data.numpy()


def lengths_digest(cu_seqlens: Sequence[IntArray]) -> int:
    """Fingerprint of a pool's sample bounds."""
    hashed = hashlib.blake2b(digest_size=8)
    for cu in cu_seqlens:
        hashed.update(len(cu).to_bytes(8, "little"))
        hashed.update(np.ascontiguousarray(cu, dtype=np.int64).tobytes())
    return int.from_bytes(hashed.digest(), "little")
