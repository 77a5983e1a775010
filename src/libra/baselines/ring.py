"""Ring attention: keys and values go round a context-parallel group while each rank attends.

    step        0            1            2           forward: keys and values
    attend   |own block|  |block -1|  |block -2|      outputs merge by their log-sum-exp
    transfer    |--->|       |--->|                   the next block travels meanwhile

In backward a block's dK and dV follow it and grow; from the last rank that reads it they go home.
Rows and whole blocks that no other rank reads, as in packs of short samples, stay where they are;
all ranks know this from the sample bounds and issue the same collectives.
After "Ring Attention with Blockwise Transformers" (Liu et al.), with zigzag shards.

Legend: T rows of this rank, R rows that meet a block, K rows of a block, N heads, D key dim,
E value dim, W = key/value heads * (D + E).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from libra.baselines.hop import Flight, exchange
from libra.baselines.ring_steps import Reads, RingSteps, ring_steps
from libra.config import HeadShape, PoolConfig, ShardLayout
from libra.data.lengths import check_cu_seqlens
from libra.runtime.inputs import find_problem, head_shape
from libra.runtime.kernels import kernel_for
from libra.runtime.kernels.interface import Buffers, Grads, Kernel
from libra.runtime.torch_private import stage

IntArray = NDArray[np.int64]


class RingLayout:
    """One pack on the ranks of one context-parallel group; serves all layers of a microbatch.

    `cu_seqlens` [samples + 1] are the whole pack's bounds, alike on every rank, `tokens` its L
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
        ranks, rank = (
            (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        )
        self.steps = ring_steps(bounds, self.tokens, ranks, rank, shard_layout)
        self._kernel = kernel
        self._programs: dict[tuple[HeadShape, torch.device], _Program] = {}

    def program(self, q_TND: Tensor, k_TND: Tensor, v_TNE: Tensor) -> _Program:
        """Kernel calls of every step, made once for a head shape and device."""
        key = (head_shape(q_TND, k_TND, v_TNE), q_TND.device)
        if key not in self._programs:
            device = q_TND.device
            kernel = kernel_for(device, self._kernel)
            self._programs[key] = _Program(self, kernel, key[0], device)
        return self._programs[key]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, layout: RingLayout, scale: float | None = None
) -> Tensor:
    """Causal attention inside each sample of the pack; arguments as for `libra.libra_attention`.

    Collective over the layout's group, forward and backward.  Raises ValueError, on this rank, for
    tensors that don't fit the layout.
    """
    config = PoolConfig(pool_size=1, chunks=1, shard_layout=layout.shard_layout)
    steps = layout.steps
    problem = find_problem(q, k, v, steps.rows, layout.tokens, config, steps.ranks)
    if problem is not None:
        raise ValueError(problem)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    out: Tensor = _Ring.apply(q, k, v, layout, scale)  # type: ignore[no-untyped-call]
    return out


class _Program:
    """A ring's steps on a device, for one head shape."""

    def __init__(
        self, layout: RingLayout, kernel: Kernel, heads: HeadShape, device: torch.device
    ) -> None:
        self.kernel = kernel
        self.steps = layout.steps
        self.group = layout.group
        self.padding = torch.from_numpy(self.steps.padding).to(device)
        self.calls: list[_Call | None] = []
        for step, reads in enumerate(self.steps.reads):
            first = self.steps.first[self.steps.source(step)] if step else 0
            call = _Call(reads, first, heads, kernel, device, causal=step == 0)
            self.calls.append(call if len(reads.q_start) else None)


class _Call:
    """What this rank attends to at one step."""

    def __init__(
        self,
        reads: Reads,
        first: int,
        heads: HeadShape,
        kernel: Kernel,
        device: torch.device,
        *,
        causal: bool,
    ) -> None:
        segments = reads.segments(first, heads.q, heads.kv, causal=causal)
        self.prepared = kernel.prepare(segments, device)
        self.lse_size = segments.lse_size
        begin = np.cumsum(reads.q_len) - reads.q_len
        row = np.arange(int(reads.q_len.sum())) - np.repeat(begin, reads.q_len)
        place = np.repeat(begin * heads.q, reads.q_len) + row
        stride = np.repeat(reads.q_len, reads.q_len)
        self.rows = torch.from_numpy(np.repeat(reads.q_start, reads.q_len) + row).to(device)
        """Query rows that this call meets, [R]."""
        at_RN = place[:, None] + stride[:, None] * np.arange(heads.q)
        self.lse_at = torch.from_numpy(at_RN).to(device)
        """Where row and head lie in the kernel's flat LSE, [R, N]."""

    def flat_lse(self, lse_TN: Tensor) -> Tensor:
        """The rows' final LSE as the kernel takes it."""
        flat = lse_TN.new_empty(self.lse_size)
        flat[self.lse_at] = lse_TN[self.rows]
        return flat


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_TND: Tensor, k_TND: Tensor, v_TNE: Tensor, layout: RingLayout, scale: float
    ) -> Tensor:
        program = layout.program(q_TND, k_TND, v_TNE)
        out_TNE, lse_TN = _forward(program, q_TND, k_TND, v_TNE, scale)
        ctx.save_for_backward(q_TND, k_TND, v_TNE, out_TNE, lse_TN)
        ctx.program, ctx.scale = program, scale
        return out_TNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TNE: Tensor) -> tuple[Tensor | None, ...]:
        q_TND, k_TND, v_TNE, out_TNE, lse_TN = ctx.saved_tensors
        dout_TNE = dout_TNE.contiguous()
        gradients = _backward(
            ctx.program, dout_TNE, q_TND, k_TND, v_TNE, out_TNE, lse_TN, ctx.scale
        )
        return (*gradients, None, None)


def _forward(
    program: _Program, q_TND: Tensor, k_TND: Tensor, v_TNE: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, N, E] and LSE [T, N] in at least fp32."""
    exact = torch.promote_types(q_TND.dtype, torch.float32)
    shape = (*q_TND.shape[:2], v_TNE.shape[2])
    sum_TNE = q_TND.new_empty(shape, dtype=exact)
    lse_TN = q_TND.new_empty(shape[:2], dtype=exact)
    sum_TNE[program.padding], lse_TN[program.padding] = 0, 0
    part_TNE = q_TND.new_empty(shape)
    block_KW = _own_block(program.steps, k_TND, v_TNE)
    for step, call in enumerate(program.calls):
        flight = _pass_on(program, step, block_KW)
        if call is not None:
            k, v = (k_TND, v_TNE) if step == 0 else _split(block_KW, k_TND, v_TNE)
            flat = lse_TN.new_empty(call.lse_size)
            with stage("attend"):
                buffers = Buffers(q_TND, k, v, part_TNE, flat)
                program.kernel.forward(call.prepared, buffers, scale)
            _merge(sum_TNE, lse_TN, part_TNE, flat, call, opens=step == 0)
        block_KW = flight.wait(program.steps.before)
    return sum_TNE.to(q_TND.dtype), lse_TN


def _merge(
    sum_TNE: Tensor, lse_TN: Tensor, part_TNE: Tensor, flat: Tensor, call: _Call, *, opens: bool
) -> None:
    """Fold a block's outputs in; step 0 meets every row, so it opens all."""
    part_RN = flat[call.lse_at]
    part_RNE = part_TNE.index_select(0, call.rows).to(sum_TNE.dtype)
    if opens:
        sum_TNE.index_copy_(0, call.rows, part_RNE)
        lse_TN.index_copy_(0, call.rows, part_RN)
        return
    lse_RN = lse_TN.index_select(0, call.rows)
    weight_RN1 = torch.sigmoid(part_RN - lse_RN)[..., None]
    merged_RNE = sum_TNE.index_select(0, call.rows).lerp_(part_RNE, weight_RN1)
    sum_TNE.index_copy_(0, call.rows, merged_RNE)
    lse_TN.index_copy_(0, call.rows, torch.logaddexp(lse_RN, part_RN))


def _backward(
    program: _Program,
    dout_TNE: Tensor,
    q_TND: Tensor,
    k_TND: Tensor,
    v_TNE: Tensor,
    out_TNE: Tensor,
    lse_TN: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of this rank's rows; sums in at least fp32, in the order of the ring."""
    steps, exact = program.steps, lse_TN.dtype
    dq_TND = torch.zeros_like(q_TND, dtype=exact)
    part_TND = torch.empty_like(q_TND)
    dk_TND, dv_TNE = (torch.zeros_like(t, dtype=exact) for t in (k_TND, v_TNE))
    block_KW = _own_block(steps, k_TND, v_TNE)
    gradients: Flight | None = None
    for step, call in enumerate(program.calls):
        flight = _pass_on(program, step, block_KW)
        grown_KW = torch.zeros_like(block_KW, dtype=exact)
        if call is not None:
            k, v = (k_TND, v_TNE) if step == 0 else _split(block_KW, k_TND, v_TNE)
            dk, dv = (dk_TND, dv_TNE) if step == 0 else _split(grown_KW, k_TND, v_TNE)
            flat = call.flat_lse(lse_TN)
            with stage("attend_backward"):
                buffers = Buffers(q_TND, k, v, out_TNE, flat)
                grads = Grads(dout_TNE, part_TND, dk, dv)
                program.kernel.backward(call.prepared, buffers, grads, scale)
            dq_TND.index_add_(0, call.rows, part_TND.index_select(0, call.rows).to(exact))
        if gradients is not None:
            _land(steps, step - 1, gradients, grown_KW, dk_TND, dv_TNE)
        gradients = _hand_on(program, step, grown_KW) if step else None
        block_KW = flight.wait(steps.before)
    if gradients is not None:
        _land(steps, steps.ranks - 1, gradients, block_KW, dk_TND, dv_TNE)
    return dq_TND.to(q_TND.dtype), dk_TND.to(k_TND.dtype), dv_TNE.to(v_TNE.dtype)


def _own_block(steps: RingSteps, k_TND: Tensor, v_TNE: Tensor) -> Tensor:
    """What other ranks read of this rank's keys and values, side by side, [K, W]."""
    rows = slice(steps.first[steps.rank], steps.stop[steps.rank])
    return torch.cat([k_TND[rows].flatten(1), v_TNE[rows].flatten(1)], dim=1)


def _split(block_KW: Tensor, k_TND: Tensor, v_TNE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a block, as views."""
    k_KW, v_KW = block_KW.split([k_TND[0].numel(), v_TNE[0].numel()], dim=1)
    return k_KW.unflatten(1, k_TND.shape[1:]), v_KW.unflatten(1, v_TNE.shape[1:])


def _pass_on(program: _Program, step: int, block_KW: Tensor) -> Flight:
    """Send the block held at `step` to the next rank, if that or a later one reads it."""
    steps = program.steps
    sends, receives = {}, {}
    if step < steps.last[steps.source(step)]:
        sends[steps.after] = block_KW
    if step < steps.last[steps.source(step + 1)]:
        receives[steps.before] = steps.shared(steps.source(step + 1))
    moves = any(step < last for last in steps.last)
    return exchange(program.group if moves else None, sends, receives, block_KW)


def _hand_on(program: _Program, step: int, grown_KW: Tensor) -> Flight:
    """Send the gradient of the block held at `step` to the next rank that reads it, or home."""
    steps = program.steps
    sends, receives = {}, {}
    source = steps.source(step)
    if step <= steps.last[source]:
        sends[steps.after if step < steps.last[source] else source] = grown_KW
    coming = steps.source(step + 1)
    if step < steps.last[coming]:
        receives[steps.before] = steps.shared(coming)
    if step == steps.last[steps.rank]:
        receives[(steps.rank + step) % steps.ranks] = steps.shared(steps.rank)
    moves = any(step <= last for last in steps.last)
    return exchange(program.group if moves else None, sends, receives, grown_KW)


def _land(
    steps: RingSteps,
    step: int,
    flight: Flight,
    grown_KW: Tensor,
    dk_TND: Tensor,
    dv_TNE: Tensor,
) -> None:
    """Add what was handed on after `step`: to the next block's gradient, or to this rank's own."""
    if step < steps.last[steps.source(step + 1)]:
        grown_KW += flight.wait(steps.before)
    if step == steps.last[steps.rank]:
        home_KW = flight.wait((steps.rank + step) % steps.ranks)
        rows = slice(steps.first[steps.rank], steps.stop[steps.rank])
        for local, part in zip((dk_TND, dv_TNE), _split(home_KW, dk_TND, dv_TNE), strict=True):
            local[rows] += part
    flight.wait(steps.rank)
