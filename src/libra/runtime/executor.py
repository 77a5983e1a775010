"""The pipeliner: dispatch, attend and return, chunk by chunk, forward and backward.

    chunk          0           1           2
    dispatch    |=====|=====|=====|                        posted at once, in order
    attend      |local calls ...|  0  |  1  |  2  |        local calls hide the first dispatch
    return                            |==0==|==1==|==2==|  only the last return is exposed

Every worker of a pool posts the same collectives in the same order, whatever it has to compute.
K and V may travel in two hops, see `exchange`, and so may their gradients, see `kv_grad_reduce`.
Legend: T local rows, N heads, D key dim, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from libra.plan.attention_calls import LOCAL
from libra.runtime.all_to_all import Transfer
from libra.runtime.device_plan import DevicePlan, Operands
from libra.runtime.exchange import Exchange, Inbound, PendingOutput
from libra.runtime.kernels.interface import Buffers, Grads
from libra.runtime.kv_grad_reduce import CastScratch, KVGradReduce
from libra.runtime.torch_private import stage
from libra.runtime.workspace import Space, Workspace


class Saved(NamedTuple):
    """Inputs and results of a forward, as its backward reads them; unneeded results are empty."""

    q_TND: Tensor
    k_TND: Tensor
    v_TNE: Tensor
    out_TNE: Tensor
    lse: Tensor
    """Flat LSE of the segments computed here, fp32 (fp64 for fp64), like sums of dK and dV."""
    peer_out: Tensor
    """Outputs computed for other workers, flat."""
    fetched: Tensor
    """Q, K and V of other workers, flat; empty if the backward fetches them again."""


@dataclass(frozen=True, slots=True, eq=False)
class Executor:
    """Runs both passes of a device plan, layer after layer."""

    device_plan: DevicePlan
    group: dist.ProcessGroup
    workspace: Workspace

    def forward(
        self, q_TND: Tensor, k_TND: Tensor, v_TNE: Tensor, scale: float, *, save_for_backward: bool
    ) -> Saved:
        """Attention of this worker's rows, on whichever worker it is computed."""
        # Step 1: allocate.  Tensors that a backward needs stand alone; others are parts of the
        # workspace.
        q_TND, k_TND, v_TNE = q_TND.contiguous(), k_TND.contiguous(), v_TNE.contiguous()
        plan, memory = self.device_plan, self.device_plan.memory
        save_fetched = save_for_backward and not plan.refetch
        elements = memory.forward
        elements += 0 if save_fetched else memory.fetched
        elements += 0 if save_for_backward else memory.peer_out
        (space,) = self.workspace.open(q_TND.device, (q_TND.dtype, elements))
        fetched = _allocate(q_TND, space, memory.fetched, saved=save_fetched)
        peer_out = _allocate(q_TND, space, memory.peer_out, saved=save_for_backward)
        out_TNE = q_TND.new_empty((q_TND.shape[0], plan.heads.q, plan.heads.value_dim))
        _zero_padding(plan, out_TNE)
        lse = q_TND.new_empty(plan.lse_size, dtype=torch.promote_types(q_TND.dtype, torch.float32))
        saved = Saved(q_TND, k_TND, v_TNE, out_TNE, lse, peer_out, fetched)
        operands = _cut_operands(plan, saved)

        # Step 2: dispatch all chunks at once.
        exchange = Exchange(plan, self.group, space)
        chunks, idle = range(plan.chunks), plan.idle_forward
        inbound = [exchange.dispatch(chunk, operands) for chunk in chunks]

        # Step 3: attend and return, chunk by chunk.  A chunk without work for others returns first.
        pending = [exchange.post_return(n, operands.out, inbound[n].q) for n in chunks[:idle]]
        _attend(plan, LOCAL, operands, lse, scale)
        for chunk in chunks:
            exchange.complete(chunk, inbound)
            _attend(plan, chunk, operands, lse, scale)
            if chunk >= idle:
                pending.append(exchange.post_return(chunk, operands.out, inbound[chunk].q))

        # Step 4: wait for what returns.
        for output in pending:
            if output is not None:
                output.finish()
        return Saved(
            *saved[:4],
            lse if save_for_backward else lse.new_empty(0),
            peer_out if save_for_backward else peer_out.new_empty(0),
            fetched if save_fetched else fetched.new_empty(0),
        )

    def backward(
        self, dout_TNE: Tensor, saved: Saved, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this worker's q, k and v, in their shapes.

        dK and dV are summed in fp32 (fp64 for fp64): this worker's own part first, then the parts
        of other workers, chunk by chunk in worker order, so that repeated runs are bit-identical.
        """
        # Step 1: allocate.
        plan, memory = self.device_plan, self.device_plan.memory
        dtype, sums_dtype = dout_TNE.dtype, saved.lse.dtype
        accum, space = self.workspace.open(
            dout_TNE.device, (sums_dtype, memory.accum_fp32), (dtype, memory.backward)
        )
        saved = Saved(*map(Tensor.contiguous, saved))
        if plan.refetch:
            saved = saved._replace(fetched=space.take(memory.fetched))
        operands = _cut_operands(plan, saved)
        grads = _allocate_grads(plan, accum, space, dout_TNE.contiguous(), saved)
        scratch = CastScratch(
            accum.take(memory.holder_scratch), accum.take(memory.multicast_scratch)
        )

        # Step 2: dispatch all chunks at once: dO, and K, V and Q again where they were not saved.
        exchange = Exchange(plan, self.group, space)
        chunks, idle = range(plan.chunks), plan.idle_backward
        douts, inbound = [], []
        for chunk in chunks:
            douts.append(Inbound([], exchange.post_queries(chunk, grads.out)))
            if plan.refetch:
                inbound.append(exchange.dispatch(chunk, operands))
        queries = inbound if plan.refetch else douts

        # Step 3: attend and return, chunk by chunk, as in the forward.
        returns = _GradReturns(exchange, scratch, grads)
        for chunk in chunks[:idle]:
            returns.post(chunk, queries[chunk].q)
        _attend(plan, LOCAL, operands, saved.lse, scale, grads)
        for chunk in chunks:
            douts[chunk].wait()
            if plan.refetch:
                exchange.complete(chunk, inbound)
            _attend(plan, chunk, operands, saved.lse, scale, grads)
            if chunk >= idle:
                returns.post(chunk, queries[chunk].q)

        # Step 4: wait for what returns, add it up, and round the sums once.
        returns.finish()
        return grads.q.local, grads.k.local.to(dtype), grads.v.local.to(dtype)


@dataclass(slots=True, eq=False)
class _GradReturns:
    """Returns of dQ, dK and dV, posted chunk by chunk in an order that all workers share."""

    exchange: Exchange
    scratch: CastScratch
    grads: Operands
    pending: list[PendingOutput | KVGradReduce] = field(default_factory=list)
    blocked: list[KVGradReduce] = field(default_factory=list)
    """Reductions of the chunk before that would have blocked the thread."""

    def post(self, chunk: int, queries: Transfer | None) -> None:
        """Post the gradients that are complete after `chunk`."""
        # Step 1: send what had to wait for its rows of hop 2 while the chunk was computed.
        self._send_blocked()
        # Step 2: dK and dV leave for the first readers, dQ for its home, dK and dV for theirs.
        reduces = [
            KVGradReduce(self.exchange, self.scratch, buffer, grad)
            for buffer in self.exchange.device_plan.kv_returns[chunk]
            for grad in (self.grads.k, self.grads.v)
        ]
        for reduce in reduces:
            reduce.collect()
        dq = self.exchange.post_return(chunk, self.grads.q, queries)
        if dq is not None:
            self.pending.append(dq)
        for reduce in reduces:
            if not reduce.blocks:
                reduce.send()
        self.blocked = [reduce for reduce in reduces if reduce.blocks]
        self.pending += reduces

    def finish(self) -> None:
        """Wait for all gradients and add them up."""
        self._send_blocked()
        for pending in self.pending:
            pending.finish()

    def _send_blocked(self) -> None:
        for reduce in self.blocked:
            reduce.send()


def _attend(
    plan: DevicePlan,
    chunk: int,
    operands: Operands,
    lse: Tensor,
    scale: float,
    grads: Operands | None = None,
) -> None:
    """Run the kernel calls that wait for `chunk`: their backward if `grads` are given."""
    q, k, v, out = operands
    for call in plan.calls[chunk]:
        at_q, at_kv = call.q_buffer, call.kv_buffer
        buffers = Buffers(q[at_q], k[at_kv], v[at_kv], out[at_q], lse[call.lse])
        if grads is None:
            with stage("attend"):
                plan.kernel.forward(call.prepared, buffers, scale)
            continue
        dq, dk, dv, dout = grads
        with stage("attend_backward"):
            call_grads = Grads(dout[at_q], dq[at_q], dk[at_kv], dv[at_kv])
            plan.kernel.backward(call.prepared, buffers, call_grads, scale)


def _cut_operands(plan: DevicePlan, saved: Saved) -> Operands:
    """Arguments of the kernel: local tensors, and the rows of other workers by chunk."""
    peer_q, peer_kv = saved.fetched.split([plan.memory.fetched_q, plan.memory.fetched_kv])
    return plan.operands(saved[:4], peer_q, peer_kv, saved.peer_out)


def _allocate(like: Tensor, space: Space, elements: int, *, saved: bool) -> Tensor:
    """A flat tensor of its own if a backward will need it, else a part of the workspace."""
    return like.new_empty(elements) if saved else space.take(elements)


def _allocate_grads(
    plan: DevicePlan, accum: Space, space: Space, dout_TNE: Tensor, saved: Saved
) -> Operands:
    """Gradients, like `_cut_operands`; sums of dK and dV start at zero."""
    memory = plan.memory
    dq_TND = torch.empty_like(saved.q_TND)
    _zero_padding(plan, dq_TND)
    peer_dout, peer_dq = space.take(memory.peer_out), space.take(memory.fetched_q)
    peer_dkv = accum.take(memory.fetched_kv).zero_()
    if accum.flat.dtype == space.flat.dtype:
        dk_TND, dv_TNE = torch.zeros_like(saved.k_TND), torch.zeros_like(saved.v_TNE)
    else:  # the results are cast from these sums
        dk_TND = accum.take(*saved.k_TND.shape).zero_()
        dv_TNE = accum.take(*saved.v_TNE.shape).zero_()
    return plan.operands((dq_TND, dk_TND, dv_TNE, dout_TNE), peer_dq, peer_dkv, peer_dout)


def _zero_padding(device_plan: DevicePlan, rows: Tensor) -> None:
    """Set rows that belong to no sample, which no kernel writes, to zero."""
    if device_plan.padding is not None:
        rows.index_fill_(0, device_plan.padding, 0)
