"""Ring attention: keys and values go round a context-parallel group while each rank attends.

    step        0            1            2           forward: keys and values
    attend   |own block|  |block -1|  |block -2|      outputs merge by their log-sum-exp
    transfer    |--->|       |--->|                   the next block travels meanwhile

In backward the dK and dV of a block follow the block and grow; the last rank that reads the block
sends them to the block's own rank.  Rows and whole blocks that no other rank reads, as in packs of
short samples, do not travel.  All ranks derive this from the sample bounds and issue the same
collectives.  After "Ring Attention with Blockwise Transformers" (Liu et al.), with zigzag shards.

Legend: T rows of this rank, R rows that read a block, K rows of a block, N heads, D key dim,
E value dim, W = key/value heads * (D + E).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor
from torch.autograd.function import once_differentiable

from libra.baselines.ring_steps import Hop, RingSteps, ring_steps
from libra.config import HeadShape, PoolConfig, ShardLayout
from libra.data.lengths import check_cu_seqlens
from libra.plan.attention_calls import AttentionCall
from libra.runtime.all_to_all import Transfer
from libra.runtime.inputs import find_problem, head_shape
from libra.runtime.kernels import kernel_for
from libra.runtime.kernels.interface import Buffers, Grads, Kernel
from libra.runtime.kernels.packed import Rows, lse_index, query_rows
from libra.runtime.torch_private import stage


class RingMicrobatch:
    """One pack on the ranks of one context-parallel group; serves all layers.

    `cu_seqlens` [samples + 1] are the bounds of the whole pack, equal on every rank, `tokens` its L
    where it ends in padding.  Each rank holds the rows that `libra.local_positions` gives it for
    `shard_layout`.  `group` None is a group of this rank alone.  Not collective.
    """

    def __init__(
        self,
        cu_seqlens: ArrayLike,
        group: dist.ProcessGroup | None,
        *,
        tokens: int | None = None,
        shard_layout: ShardLayout = "zigzag",
        kernel: str | Kernel | None = None,
    ) -> None:
        bounds = check_cu_seqlens(cu_seqlens, tokens=tokens)
        self.tokens = int(bounds[-1]) if tokens is None else tokens
        self.group = group
        self.shard_layout: ShardLayout = shard_layout
        ranks = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        self.steps = ring_steps(bounds, self.tokens, ranks, rank, shard_layout)
        self._kernel = kernel
        self._prepared: dict[tuple[HeadShape, torch.device], tuple[_Call | None, ...]] = {}

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[_Call | None, ...]:
        """Kernel calls of every step, prepared once for a head shape and device.

        None at a step whose block this rank does not read.
        """
        key = (head_shape(q, k, v), q.device)
        if key not in self._prepared:
            self._prepared[key] = _prepare(self.steps, kernel_for(q.device, self._kernel), *key)
        return self._prepared[key]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, microbatch: RingMicrobatch, scale: float | None = None
) -> Tensor:
    """Causal attention inside each sample of the pack; arguments as for `libra.libra_attention`.

    Collective over the microbatch's group, forward and backward.  Raises ValueError, on this rank,
    for tensors that don't fit the microbatch.
    """
    config = PoolConfig(pool_size=1, chunks=1, shard_layout=microbatch.shard_layout)
    steps = microbatch.steps
    problem = find_problem(q, k, v, steps.rows, microbatch.tokens, config, steps.ranks)
    if problem is not None:
        raise ValueError(problem)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    out: Tensor = _Ring.apply(q, k, v, microbatch, scale)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Attention of this rank to the block of one step."""

    kernel: Kernel
    prepared: Any
    lse_size: int
    rows: Rows
    """Query rows that read the block, [R]."""
    lse_index: Tensor
    """The element of the kernel's flat LSE that holds (row, head), int64 [R, N]."""

    def flat_lse(self, lse_TN: Tensor) -> Tensor:
        """The rows' final LSE in the kernel's order."""
        flat = lse_TN.new_empty(self.lse_size)
        flat[self.lse_index] = self.rows.gather(lse_TN[..., None])[..., 0]
        return flat


def _prepare(
    steps: RingSteps, kernel: Kernel, heads: HeadShape, device: torch.device
) -> tuple[_Call | None, ...]:
    calls: list[_Call | None] = []
    for step, reads in enumerate(steps.reads):
        # A block that has travelled begins with the first row that any other rank reads.
        first = steps.first[steps.source(step)] if step else 0
        call = replace(reads, k_start=reads.k_start - first, heads=heads.q, kv_heads=heads.kv)
        calls.append(_prepare_call(call, kernel, device) if len(call) else None)
    return tuple(calls)


def _prepare_call(call: AttentionCall, kernel: Kernel, device: torch.device) -> _Call:
    every = np.arange(len(call))
    return _Call(
        kernel=kernel,
        prepared=kernel.prepare(call, device),
        lse_size=call.lse_size,
        rows=query_rows(call, every, device),
        lse_index=lse_index(call, every, device).view(call.heads, -1).T,
    )


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TND: Tensor,
        k_TND: Tensor,
        v_TNE: Tensor,
        microbatch: RingMicrobatch,
        scale: float,
    ) -> Tensor:
        """Output [T, N, E]; sums and LSE [T, N] are in at least fp32."""
        calls, padding = microbatch.prepared(q_TND, k_TND, v_TNE), microbatch.steps.padding
        sums = torch.promote_types(q_TND.dtype, torch.float32)
        part_TNE = q_TND.new_empty((*q_TND.shape[:2], v_TNE.shape[2]))
        sum_TNE = torch.empty_like(part_TNE, dtype=sums)
        lse_TN = q_TND.new_empty(q_TND.shape[:2], dtype=sums)
        # No step writes rows of padding.
        sum_TNE[padding], lse_TN[padding] = 0, 0
        for step, _, k, v in _rotate(microbatch, k_TND, v_TNE):
            call = calls[step]
            if call is None:
                continue
            flat = lse_TN.new_empty(call.lse_size)
            with stage("attend"):
                buffers = Buffers(q_TND, k, v, part_TNE, flat)
                call.kernel.forward(call.prepared, buffers, scale)
            _merge(sum_TNE, lse_TN, part_TNE, flat, call, opens=step == 0)
        out_TNE = sum_TNE.to(q_TND.dtype)
        ctx.save_for_backward(q_TND, k_TND, v_TNE, out_TNE, lse_TN)
        ctx.microbatch, ctx.scale = microbatch, scale
        return out_TNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TNE: Tensor) -> tuple[Tensor | None, ...]:
        """dQ, dK and dV of this rank's rows; sums in at least fp32, in the order of the ring."""
        q_TND, k_TND, v_TNE, out_TNE, lse_TN = ctx.saved_tensors
        steps, group = ctx.microbatch.steps, ctx.microbatch.group
        calls = ctx.microbatch.prepared(q_TND, k_TND, v_TNE)
        dout_TNE, part_TND = dout_TNE.contiguous(), torch.empty_like(q_TND)
        # `own` are dK and dV of this rank's block.
        dq_TND, *own = (torch.zeros_like(t, dtype=lse_TN.dtype) for t in (q_TND, k_TND, v_TNE))
        grad_flight: _Flight | None = None
        for step, block_KW, k, v in _rotate(ctx.microbatch, k_TND, v_TNE):
            # Step 1: this rank's part of the block's gradient.  The own block's goes to dK and dV.
            grad_KW = torch.zeros_like(block_KW, dtype=lse_TN.dtype)
            dk, dv = _split(grad_KW, k_TND, v_TNE) if step else own
            call = calls[step]
            if call is not None:
                with stage("attend_backward"):
                    buffers = Buffers(q_TND, k, v, out_TNE, call.flat_lse(lse_TN))
                    grads = Grads(dout_TNE, part_TND, dk, dv)
                    call.kernel.backward(call.prepared, buffers, grads, ctx.scale)
                call.rows.scatter_add(dq_TND, call.rows.gather(part_TND))
            # Step 2: add the earlier readers' part, which was sent one step ago.
            if grad_flight is not None:
                if step <= steps.last[steps.source(step)]:
                    grad_KW += grad_flight.wait(steps.before)
                _add_own(steps, step - 1, grad_flight, own)
            # Step 3: send the gradient to the next reader, or to the block's own rank.
            if step:
                grad_flight = _send(group, steps.grad_hop(step), grad_KW)
        if grad_flight is not None:
            _add_own(steps, steps.ranks - 1, grad_flight, own)
        return (*(grad.to(q_TND.dtype) for grad in (dq_TND, *own)), None, None)


def _merge(
    sum_TNE: Tensor, lse_TN: Tensor, part_TNE: Tensor, flat: Tensor, call: _Call, *, opens: bool
) -> None:
    """Merge a block's outputs into the sum, which step 0 opens: there every row reads a key."""
    # `Rows` address buffers of three dimensions, so the LSE is given a last one.
    lse_TN1 = lse_TN[..., None]
    lse_RN1 = flat[call.lse_index][..., None]
    out_RNE = call.rows.gather(part_TNE).to(sum_TNE.dtype)
    if not opens:
        before_RN1 = call.rows.gather(lse_TN1)
        weight_RN1 = torch.sigmoid(lse_RN1 - before_RN1)
        out_RNE = torch.lerp(call.rows.gather(sum_TNE), out_RNE, weight_RN1)
        lse_RN1 = torch.logaddexp(before_RN1, lse_RN1)
    call.rows.scatter(sum_TNE, out_RNE)
    call.rows.scatter(lse_TN1, lse_RN1)


def _rotate(
    microbatch: RingMicrobatch, k_TND: Tensor, v_TNE: Tensor
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(step, block [K, W], its keys, its values) of the block that this rank holds at each step.

    The next block travels behind the work on this one.  The own block is read from its own buffers.
    """
    steps = microbatch.steps
    block_KW = torch.cat([t[steps.shared].flatten(1) for t in (k_TND, v_TNE)], dim=1)
    for step in range(steps.ranks):
        # Posted before the caller computes, waited for after it.
        flight = _send(microbatch.group, steps.block_hop(step), block_KW)
        yield step, block_KW, *(_split(block_KW, k_TND, v_TNE) if step else (k_TND, v_TNE))
        block_KW = flight.wait(steps.before)


def _split(block_KW: Tensor, k_TND: Tensor, v_TNE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a block, as views."""
    k_KW, v_KW = block_KW.split([t.shape[1:].numel() for t in (k_TND, v_TNE)], dim=1)
    return k_KW.unflatten(1, k_TND.shape[1:]), v_KW.unflatten(1, v_TNE.shape[1:])


def _add_own(steps: RingSteps, step: int, flight: _Flight, own: Sequence[Tensor]) -> None:
    """Add the other ranks' gradient of this rank's own block, if it was sent after `step`."""
    rows_KW = flight.wait(steps.last_reader)
    if step == steps.last[steps.rank]:
        for sums, part in zip(own, _split(rows_KW, *own), strict=True):
            sums[steps.shared] += part


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """Rows on their way to this rank, ordered by the rank that sends them."""

    arrives: Tensor
    hop: Hop
    transfer: Transfer | None

    def wait(self, rank: int) -> Tensor:
        """The rows that `rank` sent, [0, W] where it sent none."""
        if self.transfer is not None:
            with stage("wait"):
                self.transfer.wait()
        rows_KW: Tensor = self.arrives.split(self.hop.recv_splits)[rank]
        return rows_KW


def _send(group: dist.ProcessGroup | None, hop: Hop, block_KW: Tensor) -> _Flight:
    """Post one hop, an all-to-all with few parts that are not empty.  Collective if any moves."""
    arrives = block_KW.new_empty((sum(hop.recv_splits), block_KW.shape[1]))
    # All ranks know whether any of them sends, so all leave the collective out, or none.
    if group is None or not hop.moves:
        return _Flight(arrives, hop, None)
    sent = block_KW[: sum(hop.send_splits)]
    with stage("dispatch"):
        work = dist.all_to_all_single(
            arrives, sent, hop.recv_splits, hop.send_splits, group=group, async_op=True
        )
    return _Flight(arrives, hop, Transfer(arrives, sent, work, group))
