"""A microbatch: the sample bounds of one pool's microbatch, its plans, and the attention of its layers.

Operators take tensors and numbers only, so the attention operator finds its microbatch by number: the
innermost active one, or the one whose number autograd kept.  That is what the two module-level
tables are for; nothing else uses them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from libra.config import HeadShape
from libra.plan.plan_pool import PoolPlan
from libra.runtime import executor
from libra.runtime.consensus import reach_consensus
from libra.runtime.device_plan import DevicePlan, make_device_plan
from libra.runtime.failure import naming_lost_ranks
from libra.runtime.inputs import describe, find_problem, head_shape
from libra.runtime.planner_thread import Planned, lengths_digest

if TYPE_CHECKING:
    from libra.runtime.pool import SequencePool

IntArray = NDArray[np.int64]

_serials = itertools.count(1)
_microbatches: weakref.WeakValueDictionary[int, Microbatch] = weakref.WeakValueDictionary()
_active: list[Microbatch] = []


def find_microbatch(serial: int) -> Microbatch:
    """The microbatch of that number; 0 is the innermost active one.  Raises RuntimeError where there is
    none.
    """
    if serial == 0:
        if not _active:
            raise RuntimeError(
                "libra_attention was called outside a microbatch: wrap the forward in `with "
                "pool.microbatch(cu_seqlens):`. "
                "Under activation checkpointing the backward runs the forward again, so keep it "
                "inside as well, "
                "or pass microbatch=... explicitly"
            )
        return _active[-1]
    microbatch = _microbatches.get(serial)
    if microbatch is None:
        raise RuntimeError(
            f"microbatch {serial} is gone before its backward ran: more than "
            "SequencePool(live_microbatches=...) microbatches "
            "were started since; raise it"
        )
    return microbatch


class Microbatch:
    """One microbatch of a pool.  Made by `SequencePool.microbatch`; enter it around forward and
    backward.
    """

    def __init__(
        self, pool: SequencePool, cu_seqlens: Sequence[IntArray], tokens: int, rows: int
    ) -> None:
        self.serial = next(_serials)
        self.cu_seqlens = tuple(cu_seqlens)
        """Sample bounds of every pack of the pool, int64."""
        self.tokens = tokens
        """L, padding included."""
        self.rows = rows
        """Rows of q, k and v on this rank."""
        self.digest = lengths_digest(self.cu_seqlens)
        self.calls = 0
        """Attention calls so far, recomputed ones included."""
        self._pool = pool
        self._planned: dict[HeadShape, Future[Planned]] = {}
        self._programs: dict[tuple[HeadShape, torch.device], DevicePlan] = {}
        _microbatches[self.serial] = self

    def __enter__(self) -> Microbatch:
        _active.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Its last entry: a recomputation may enter an outer microbatch again inside an inner one.
        del _active[len(_active) - 1 - _active[::-1].index(self)]

    def start_planning(self, heads: HeadShape) -> Future[Planned]:
        """Plan for a head shape on the planner thread, once.  Collective: every rank asks for the
        same shapes in turn.
        """
        if heads not in self._planned:
            self._planned[heads] = self._pool.planner.submit(self.cu_seqlens, self.tokens, heads)
        return self._planned[heads]

    def plan(self, heads: HeadShape | None = None) -> PoolPlan:
        """The plan for `heads`, or for the only head shape seen so far."""
        if heads is None:
            if len(self._planned) != 1:
                raise ValueError(
                    "microbatch.plan() without heads needs exactly one planned head shape; there are "
                    f"{len(self._planned)}"
                )
            (heads,) = self._planned
        with self._watch("planning"):
            return self.start_planning(heads).result().plan

    def attend(
        self,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TNE: torch.Tensor,
        scale: float,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forward of one layer: (out, lse, outputs computed for others, fetched); the last three
        empty unless `keep`.
        """
        pool = self._pool
        self.calls += 1
        problem = (
            pool.broken
            or find_problem(
                q_TND, k_TND, v_TNE, self.rows, self.tokens, pool.config, pool.membership.cp_size
            )
            or self._missing_kernel(q_TND.device)
        )
        facts: dict[str, object] = {"scale": scale, "grad": keep}
        if problem is None:
            facts |= describe(q_TND, k_TND, v_TNE)
        self._agree("attention", problem, facts)
        device_plan = self._device_plan(head_shape(q_TND, k_TND, v_TNE), q_TND.device)
        with pool.exchanging(), self._watch("the forward exchange"):
            return executor.forward(
                device_plan,
                pool.groups.exchange,
                pool.workspace,
                q_TND,
                k_TND,
                v_TNE,
                scale,
                save_for_backward=keep,
            )

    def refuse(self, problem: str) -> None:
        """Raise ValueError for an attention call that is wrong on this rank, and on the others
        that make the call.
        """
        self._agree("attention", problem, {})

    def attend_backward(
        self,
        call: int,
        dout_TNE: torch.Tensor,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TNE: torch.Tensor,
        scale: float,
        out_TNE: torch.Tensor,
        lse: torch.Tensor,
        remote: torch.Tensor,
        fetched: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Backward of one layer: (dq, dk, dv).

        Agrees on the `call` first: a rank whose loss left out a call's output goes on to another
        call's backward, or to the next microbatch, and all hear of it.
        """
        pool = self._pool
        self._agree("attention's backward", pool.broken, {"call": call})
        device_plan = self._device_plan(head_shape(q_TND, k_TND, v_TNE), q_TND.device)
        with pool.exchanging(), self._watch("the backward exchange"):
            return executor.backward(
                device_plan,
                pool.groups.exchange,
                pool.workspace,
                dout_TNE,
                q_TND,
                k_TND,
                v_TNE,
                scale,
                executor.ForwardResult(out_TNE, lse, remote, fetched),
            )

    def _device_plan(self, heads: HeadShape, device: torch.device) -> DevicePlan:
        key = (heads, device)
        if key not in self._programs:
            with self._watch("planning"):
                rank_plan = self.start_planning(heads).result().rank_plan
            self._pool.remember(heads)
            self._programs[key] = make_device_plan(
                rank_plan,
                heads,
                self._pool.kernel(device),
                device,
                self._pool.multicast_stream(device),
                refetch=self._pool.config.backward == "refetch",
            )
        return self._programs[key]

    def _missing_kernel(self, device: torch.device) -> str | None:
        try:
            self._pool.kernel(device)
        except ValueError as error:
            return str(error)
        return None

    def _agree(self, where: str, problem: str | None, facts: Mapping[str, object]) -> None:
        with self._watch(where):
            reach_consensus(
                self._pool.groups.agreement,
                where,
                problem,
                {"microbatch": f"{self.digest:x}", **facts},
            )

    def _watch(self, stage: str) -> AbstractContextManager[None]:
        return naming_lost_ranks(stage, self._pool.membership.ranks)
