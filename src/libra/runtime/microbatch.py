"""A microbatch: the sample bounds of all packs of a pool, their plans, and attention under them.

An operator takes tensors and numbers only, so the attention operator finds its microbatch by
number: `INNERMOST`, or the serial that autograd saved.  The two module-level tables serve this
look-up alone.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from libra.config import HeadShape, PoolConfig
from libra.data.cp_shards import local_positions
from libra.data.lengths import IntArray
from libra.plan.plan_pool import PoolPlan
from libra.runtime.consensus import reach_consensus
from libra.runtime.device_plan import make_device_plan
from libra.runtime.executor import Executor, Saved
from libra.runtime.failure import naming_lost_ranks
from libra.runtime.inputs import describe, find_problem, head_shape
from libra.runtime.kernels import kernel_for
from libra.runtime.kernels.interface import Kernel
from libra.runtime.planner_thread import Planned, Planner, lengths_digest
from libra.runtime.process_groups import Groups, Membership
from libra.runtime.speed import SpeedMeter
from libra.runtime.workspace import Workspace

INNERMOST: Final = 0
"""In place of a serial, which counts from 1: the microbatch of the innermost `with`."""

_KernelAndStream = tuple[Kernel, torch.cuda.Stream | None]

logger = logging.getLogger(__name__)

_serials = itertools.count(1)
_microbatches: weakref.WeakValueDictionary[int, Microbatch] = weakref.WeakValueDictionary()
_active: list[Microbatch] = []


def find_microbatch(serial: int) -> Microbatch:
    """The microbatch with that serial, or the innermost active one.  RuntimeError if there is
    none.
    """
    if serial == INNERMOST:
        if not _active:
            raise RuntimeError(
                "libra_attention was called outside a microbatch: wrap the forward in `with "
                "pool.microbatch(cu_seqlens):`. Under activation checkpointing the backward runs "
                "the forward again, so keep it inside as well, or pass microbatch=... explicitly"
            )
        return _active[-1]
    microbatch = _microbatches.get(serial)
    if microbatch is None:
        raise RuntimeError(
            f"microbatch {serial} was freed before its backward ran: more than "
            "SequencePool(live_microbatches=...) microbatches were started since; raise it"
        )
    return microbatch


@dataclass(slots=True, eq=False)
class PoolRuntime:
    """State of a pool that its microbatches share."""

    config: PoolConfig
    membership: Membership
    groups: Groups
    kernel_choice: str | Kernel | None
    heads: list[HeadShape]
    """Head shapes for which every microbatch is planned."""
    meter: SpeedMeter | None = field(init=False)
    planner: Planner = field(init=False)
    workspace: Workspace = field(default_factory=Workspace)
    prefetched: list[Microbatch] = field(default_factory=list)
    """Microbatches planned ahead, in order."""
    fault: str | None = None
    """Why this rank, and so every rank, refuses all further calls, if it does."""
    _devices: dict[torch.device, _KernelAndStream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meter = SpeedMeter() if self.config.speeds == "measured" else None
        self.planner = Planner(self.groups.planner, self.membership, self.config, self.meter)

    def on_device(self, device: torch.device) -> _KernelAndStream:
        """The attention kernel for a device, and the stream that waits between the hops of K and V
        (None on a CPU).  ValueError if there is no kernel.
        """
        if device not in self._devices:
            kernel = kernel_for(device, self.kernel_choice)
            timed = kernel if self.meter is None else self.meter.timed(kernel)
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            self._devices[device] = (timed, stream)
        return self._devices[device]

    def plan_for(self, heads: HeadShape) -> None:
        """Plan coming microbatches, and those already prefetched, for this head shape too."""
        if heads not in self.heads:
            self.heads.append(heads)
            for microbatch in self.prefetched:
                microbatch.start_planning(heads)

    def agree(self, where: str, problem: str | None, facts: Mapping[str, object]) -> None:
        """`reach_consensus` of the pool, with an earlier fault as this rank's problem."""
        with naming_lost_ranks(where, self.membership.ranks):
            reach_consensus(self.groups.consensus, where, self.fault or problem, facts)

    @contextmanager
    def exchanging(self, stage: str) -> Iterator[None]:
        """Surrounds the collectives of a call.

        A call that raises leaves some under way, and this rank out of step with the others.  So its
        memory is released, not used again, and later calls are refused on every rank.
        """
        try:
            with naming_lost_ranks(stage, self.membership.ranks):
                yield
        except BaseException as error:  # a KeyboardInterrupt, too, leaves transfers under way
            self.workspace.release()
            self.fault = self.fault or (
                f"an attention call ended midway ({type(error).__name__}: {error}) and left "
                "transfers of this pool under way; make a new pool, with groups of its own"
            )
            logger.warning("pool of ranks %s: %s", self.membership.ranks, self.fault)
            raise


class Microbatch:
    """One microbatch of a pool.  Made by `SequencePool.microbatch`; enter it around forward and
    backward.
    """

    def __init__(self, runtime: PoolRuntime, cu_seqlens: Sequence[IntArray], tokens: int) -> None:
        m, layout = runtime.membership, runtime.config.shard_layout
        self.serial = next(_serials)
        self.cu_seqlens = tuple(cu_seqlens)
        """Sample bounds of every pack of the pool, int64."""
        self.tokens = tokens
        """L, padding included."""
        self.rows = len(local_positions(tokens, m.cp_size, m.worker % m.cp_size, layout))
        """Rows of q, k and v on this rank."""
        self.digest = lengths_digest(self.cu_seqlens)
        """Fingerprint of the bounds, by which ranks recognise the microbatch."""
        self.calls = 0
        """Attention calls so far, recomputed ones included."""
        self._runtime = runtime
        self._planned: dict[HeadShape, Future[Planned]] = {}
        self._executors: dict[tuple[HeadShape, torch.device], Executor] = {}
        _microbatches[self.serial] = self
        for heads in runtime.heads:
            self.start_planning(heads)

    def __enter__(self) -> Microbatch:
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        # Its last entry: a recomputation may enter an outer microbatch again inside an inner one.
        del _active[len(_active) - 1 - _active[::-1].index(self)]

    def start_planning(self, heads: HeadShape) -> Future[Planned]:
        """Plan for a head shape on the planner thread, once.  Collective: every rank asks for the
        same shapes in the same order.
        """
        if heads not in self._planned:
            self._planned[heads] = self._runtime.planner.submit(self.cu_seqlens, self.tokens, heads)
        return self._planned[heads]

    def plan(self, heads: HeadShape | None = None) -> PoolPlan:
        """The plan for `heads`, or for the only head shape so far.  Waits for it."""
        if heads is None:
            if len(self._planned) != 1:
                raise ValueError(
                    "microbatch.plan() without heads needs exactly one planned head shape; there "
                    f"are {len(self._planned)}"
                )
            (heads,) = self._planned
        return self._wait_for_plan(heads).plan

    def attend(
        self, q_TND: Tensor, k_TND: Tensor, v_TNE: Tensor, scale: float, save_for_backward: bool
    ) -> Saved:
        """Forward of one layer.  Collective over the pool."""
        runtime, qkv = self._runtime, (q_TND, k_TND, v_TNE)
        self.calls += 1
        # Step 1: all ranks accept the call, or all refuse it.
        config, cp_size = runtime.config, runtime.membership.cp_size
        problem = find_problem(*qkv, self.rows, self.tokens, config, cp_size)
        try:
            runtime.on_device(q_TND.device)
        except ValueError as error:
            problem = problem or str(error)
        facts: dict[str, object] = {"scale": scale, "grad": save_for_backward}
        self._agree("attention", problem, facts if problem else facts | describe(*qkv))
        # Step 2: compute it, with the plan for its head shape.
        executor = self._executor(head_shape(*qkv), q_TND.device)
        with runtime.exchanging("the forward exchange"):
            return executor.forward(*qkv, scale, save_for_backward=save_for_backward)

    def refuse(self, problem: str) -> None:
        """Raise ValueError for a wrong attention call, here and on the ranks that make the call."""
        self._agree("attention", problem, {})

    def attend_backward(
        self, call: int, dout_TNE: Tensor, saved: Saved, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Backward of one layer: (dq, dk, dv).  Collective over the pool.

        All ranks first agree on the `call`: a rank whose loss left out a call's output goes on to
        another call's backward, or to the next microbatch, and then all ranks raise an error.
        """
        self._agree("attention's backward", None, {"call": call})
        executor = self._executor(head_shape(*saved[:3]), dout_TNE.device)
        with self._runtime.exchanging("the backward exchange"):
            return executor.backward(dout_TNE, saved, scale)

    def _agree(self, where: str, problem: str | None, facts: Mapping[str, object]) -> None:
        self._runtime.agree(where, problem, {"microbatch": f"{self.digest:x}", **facts})

    def _executor(self, heads: HeadShape, device: torch.device) -> Executor:
        key = (heads, device)
        if key not in self._executors:
            runtime = self._runtime
            rank_plan = self._wait_for_plan(heads).rank_plan
            # Layers of this head shape will come in later microbatches too: plan them ahead.
            runtime.plan_for(heads)
            kernel, stream = runtime.on_device(device)
            refetch = runtime.config.backward == "refetch"
            plan = make_device_plan(rank_plan, heads, kernel, device, stream, refetch=refetch)
            self._executors[key] = Executor(plan, runtime.groups.exchange, runtime.workspace)
        return self._executors[key]

    def _wait_for_plan(self, heads: HeadShape) -> Planned:
        with naming_lost_ranks("planning", self._runtime.membership.ranks):
            return self.start_planning(heads).result()
