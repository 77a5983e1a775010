"""A layout: the sample bounds of one pool's microbatch, its plans, and the attention of its layers.

Operators take tensors and numbers only, so the attention operator finds its layout by number: the
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
from libra.plan.plan import PoolPlan
from libra.runtime import executor
from libra.runtime.agreement import agree
from libra.runtime.inputs import describe, find_problem, head_shape
from libra.runtime.loss import naming_lost_ranks
from libra.runtime.planner import Planned, lengths_digest
from libra.runtime.program import Program, make_program

if TYPE_CHECKING:
    from libra.runtime.pool import SequencePool

IntArray = NDArray[np.int64]

_serials = itertools.count(1)
_layouts: weakref.WeakValueDictionary[int, Layout] = weakref.WeakValueDictionary()
_active: list[Layout] = []


def find_layout(serial: int) -> Layout:
    """The layout of that number; 0 is the innermost active one.  Raises RuntimeError where there is
    none.
    """
    if serial == 0:
        if not _active:
            raise RuntimeError(
                "libra_attention was called outside a layout: wrap the forward in `with "
                "pool.layout(cu_seqlens):`. "
                "Under activation checkpointing the backward runs the forward again, so keep it "
                "inside as well, "
                "or pass layout=... explicitly"
            )
        return _active[-1]
    layout = _layouts.get(serial)
    if layout is None:
        raise RuntimeError(
            f"layout {serial} is gone before its backward ran: more than "
            "SequencePool(live_layouts=...) microbatches "
            "were started since; raise it"
        )
    return layout


class Layout:
    """One microbatch of a pool.  Made by `SequencePool.layout`; enter it around forward and
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
        self._programs: dict[tuple[HeadShape, torch.device], Program] = {}
        _layouts[self.serial] = self

    def __enter__(self) -> Layout:
        _active.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Its last entry: a recomputation may enter an outer layout again inside an inner one.
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
                    "layout.plan() without heads needs exactly one planned head shape; there are "
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
        program = self._program(head_shape(q_TND, k_TND, v_TNE), q_TND.device)
        with pool.exchanging(), self._watch("the forward exchange"):
            return executor.forward(
                program,
                pool.groups.exchange,
                pool.workspace,
                q_TND,
                k_TND,
                v_TNE,
                scale,
                keep=keep,
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
        call's backward, or to the next layout, and all hear of it.
        """
        pool = self._pool
        self._agree("attention's backward", pool.broken, {"call": call})
        program = self._program(head_shape(q_TND, k_TND, v_TNE), q_TND.device)
        with pool.exchanging(), self._watch("the backward exchange"):
            return executor.backward(
                program,
                pool.groups.exchange,
                pool.workspace,
                dout_TNE,
                q_TND,
                k_TND,
                v_TNE,
                scale,
                out_TNE,
                lse,
                remote,
                fetched,
            )

    def _program(self, heads: HeadShape, device: torch.device) -> Program:
        key = (heads, device)
        if key not in self._programs:
            with self._watch("planning"):
                route = self.start_planning(heads).result().route
            self._pool.remember(heads)
            self._programs[key] = make_program(
                route,
                heads,
                self._pool.kernel(device),
                device,
                self._pool.relay_stream(device),
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
            agree(
                self._pool.groups.agreement,
                where,
                problem,
                {"layout": f"{self.digest:x}", **facts},
            )

    def _watch(self, stage: str) -> AbstractContextManager[None]:
        return naming_lost_ranks(stage, self._pool.membership.ranks)
