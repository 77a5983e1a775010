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

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from libra.plan.attention_calls import LOCAL
from libra.runtime.all_to_all import Transfer
from libra.runtime.device_plan import DeviceCall, DevicePlan
from libra.runtime.exchange import Exchange, PendingOutput
from libra.runtime.kernels.interface import Buffers, Grads
from libra.runtime.kv_grad_reduce import CastScratch, KVGradReduce
from libra.runtime.torch_private import stage
from libra.runtime.workspace import Operand, Space, Workspace

Tensor = torch.Tensor


class ForwardResult(NamedTuple):
    """Output of a forward, and tensors that its backward reads; those that none will are empty."""

    out_TNE: Tensor
    lse: Tensor
    """Flat LSE of the segments computed here, fp32 (fp64 for fp64)."""
    peer_out: Tensor
    """Outputs computed for other workers, flat."""
    fetched: Tensor
    """Q, K and V of other workers, flat; empty if the backward fetches them again."""


class _Operands(NamedTuple):
    """Arguments of the kernel in both passes."""

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    lse: Tensor


class _GradOperands(NamedTuple):
    """Arguments of the kernel in the backward only."""

    dout: Operand
    dq: Operand
    dk: Operand
    dv: Operand


@dataclass(frozen=True, slots=True, eq=False)
class Executor:
    """Runs both passes of a device plan, layer after layer."""

    device_plan: DevicePlan
    group: dist.ProcessGroup
    workspace: Workspace

    def forward(
        self, q_TND: Tensor, k_TND: Tensor, v_TNE: Tensor, scale: float, *, save_for_backward: bool
    ) -> ForwardResult:
        """Attention of this worker's rows, on whichever worker it is computed."""
        # Allocate: tensors that a backward needs stand alone, others are cut from the workspace.
        q_TND, k_TND, v_TNE = q_TND.contiguous(), k_TND.contiguous(), v_TNE.contiguous()
        plan, memory = self.device_plan, self.device_plan.memory
        value_dim = plan.heads.value_dim
        save_fetched = save_for_backward and not plan.refetch
        elements = memory.forward
        elements += 0 if save_fetched else memory.fetched
        elements += 0 if save_for_backward else memory.peer_out
        (space,) = self.workspace.open(q_TND.device, (q_TND.dtype, elements))
        fetched = _allocate(q_TND, space, memory.fetched, saved=save_fetched)
        peer_out = _allocate(q_TND, space, memory.peer_out, saved=save_for_backward)
        out_TNE = q_TND.new_empty((q_TND.shape[0], plan.heads.q, value_dim))
        _zero_padding(plan, out_TNE)
        lse = q_TND.new_empty(plan.lse_size, dtype=_accumulator(q_TND.dtype))
        q, k, v = plan.operands(q_TND, k_TND, v_TNE, fetched)
        operands = _Operands(q, k, v, plan.q_operand(out_TNE, peer_out, value_dim), lse)

        # Dispatch all chunks at once.
        exchange = Exchange(plan, self.group, space)
        chunks, idle = range(plan.chunks), plan.idle_forward
        inbound = [exchange.dispatch(chunk, q, k, v) for chunk in chunks]

        # Attend and return, chunk by chunk; returns of idle chunks come before all computation.
        pending = [exchange.post_return(n, operands.out, inbound[n].q) for n in chunks[:idle]]
        _attend(plan, LOCAL, operands, scale)
        for chunk in chunks:
            exchange.complete(chunk, inbound)
            _attend(plan, chunk, operands, scale)
            if chunk >= idle:
                pending.append(exchange.post_return(chunk, operands.out, inbound[chunk].q))
        for output in pending:
            if output is not None:
                output.finish()
        return ForwardResult(
            out_TNE,
            lse if save_for_backward else lse.new_empty(0),
            peer_out if save_for_backward else q_TND.new_empty(0),
            fetched if save_fetched else q_TND.new_empty(0),
        )

    def backward(
        self,
        dout_TNE: Tensor,
        q_TND: Tensor,
        k_TND: Tensor,
        v_TNE: Tensor,
        scale: float,
        saved: ForwardResult,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this worker's q, k and v, in their shapes.

        dK and dV are summed in fp32 (fp64 for fp64): this worker's own part first, then the parts
        of other workers, chunk by chunk in worker order, so that repeated runs are bit-identical.
        """
        # Allocate.
        q_TND, k_TND, v_TNE = q_TND.contiguous(), k_TND.contiguous(), v_TNE.contiguous()
        plan, memory = self.device_plan, self.device_plan.memory
        accum, space = self.workspace.open(
            q_TND.device,
            (_accumulator(q_TND.dtype), memory.accum_fp32),
            (q_TND.dtype, memory.backward),
        )
        fetched = space.take(memory.fetched) if plan.refetch else saved.fetched
        q, k, v = plan.operands(q_TND, k_TND, v_TNE, fetched)
        out = plan.q_operand(saved.out_TNE, saved.peer_out, plan.heads.value_dim)
        operands = _Operands(q, k, v, out, saved.lse)
        grads = _allocate_grads(plan, accum, space, dout_TNE.contiguous(), operands)
        scratch = CastScratch(*(accum.take(elements) for elements in memory.cast_scratch))

        # Dispatch all chunks at once: dO, and K, V and Q again where they were not saved.
        exchange = Exchange(plan, self.group, space)
        chunks, idle = range(plan.chunks), plan.idle_backward
        douts, inbound = [], []
        for chunk in chunks:
            douts.append(exchange.post_queries(chunk, grads.dout))
            if plan.refetch:
                inbound.append(exchange.dispatch(chunk, q, k, v))
        queries = [arriving.q for arriving in inbound] if plan.refetch else douts

        # Attend and return, chunk by chunk, as in the forward.
        returns = _GradReturns(exchange, scratch, grads)
        for chunk in chunks[:idle]:
            returns.post(chunk, queries[chunk])
        _attend_backward(plan, LOCAL, operands, grads, scale)
        for chunk in chunks:
            if (dout := douts[chunk]) is not None:
                with stage("wait"):
                    dout.wait()
            if plan.refetch:
                exchange.complete(chunk, inbound)
            _attend_backward(plan, chunk, operands, grads, scale)
            if chunk >= idle:
                returns.post(chunk, queries[chunk])
        returns.finish()
        return grads.dq.local, grads.dk.local.to(k_TND.dtype), grads.dv.local.to(v_TNE.dtype)


class _GradReturns:
    """Returns of dQ, dK and dV, posted chunk by chunk in an order that all workers share."""

    def __init__(self, exchange: Exchange, scratch: CastScratch, grads: _GradOperands) -> None:
        self._exchange = exchange
        self._scratch = scratch
        self._grads = grads
        self._pending: list[PendingOutput | KVGradReduce] = []
        self._blocked: list[KVGradReduce] = []
        """Reductions whose second hop is under way and would block the thread."""

    def post(self, chunk: int, queries: Transfer | None) -> None:
        """Post the gradients that are complete after `chunk`."""
        self._send_blocked()
        reduces = [
            KVGradReduce(self._exchange, self._scratch, buffer, grad)
            for buffer in self._exchange.device_plan.kv_returns[chunk]
            for grad in (self._grads.dk, self._grads.dv)
        ]
        for reduce in reduces:
            reduce.collect()
        dq = self._exchange.post_return(chunk, self._grads.dq, queries)
        if dq is not None:
            self._pending.append(dq)
        for reduce in reduces:
            if reduce.blocks:
                self._blocked.append(reduce)
            else:
                reduce.send()
                self._pending.append(reduce)

    def finish(self) -> None:
        """Wait for all gradients and add them up."""
        self._send_blocked()
        for pending in self._pending:
            pending.finish()

    def _send_blocked(self) -> None:
        for reduce in self._blocked:
            reduce.send()
            self._pending.append(reduce)
        self._blocked.clear()


def _attend(device_plan: DevicePlan, chunk: int, operands: _Operands, scale: float) -> None:
    """Run the kernel calls that wait for `chunk`."""
    for call in device_plan.calls_of(chunk):
        with stage("attend"):
            device_plan.kernel.forward(call.prepared, _buffers(call, operands), scale)


def _attend_backward(
    device_plan: DevicePlan,
    chunk: int,
    operands: _Operands,
    grads: _GradOperands,
    scale: float,
) -> None:
    """Run the kernel's backward of the calls that wait for `chunk`."""
    for call in device_plan.calls_of(chunk):
        at_q, at_kv = call.q_buffer, call.kv_buffer
        with stage("attend_backward"):
            call_grads = Grads(grads.dout[at_q], grads.dq[at_q], grads.dk[at_kv], grads.dv[at_kv])
            device_plan.kernel.backward(call.prepared, _buffers(call, operands), call_grads, scale)


def _buffers(call: DeviceCall, operands: _Operands) -> Buffers:
    """Tensors that a call addresses: local ones, or those of a chunk."""
    q, k, v, out, lse = operands
    at_q, at_kv = call.q_buffer, call.kv_buffer
    return Buffers(q[at_q], k[at_kv], v[at_kv], out[at_q], lse[call.lse])


def _allocate(like: Tensor, space: Space, elements: int, *, saved: bool) -> Tensor:
    """A flat tensor of its own if a backward will need it, else a part of the workspace."""
    return like.new_empty(elements) if saved else space.take(elements)


def _allocate_grads(
    device_plan: DevicePlan, accum: Space, space: Space, dout_TNE: Tensor, operands: _Operands
) -> _GradOperands:
    """Gradients of both sides of every call; sums of dK and dV start at zero."""
    memory, heads = device_plan.memory, device_plan.heads
    q_TND, k_TND, v_TNE = operands.q.local, operands.k.local, operands.v.local
    peer_dout, peer_dq = space.take(memory.peer_out), space.take(memory.fetched_q)
    peer_dkv = accum.take(memory.fetched_kv).zero_()
    dq_TND = torch.empty_like(q_TND)
    _zero_padding(device_plan, dq_TND)
    if accum.dtype == q_TND.dtype:
        dk_TND, dv_TNE = torch.zeros_like(k_TND), torch.zeros_like(v_TNE)
    else:  # the results are cast from these sums
        dk_TND, dv_TNE = (accum.take(*local.shape).zero_() for local in (k_TND, v_TNE))
    return _GradOperands(
        device_plan.q_operand(dout_TNE, peer_dout, heads.value_dim),
        device_plan.q_operand(dq_TND, peer_dq, heads.dim),
        *device_plan.kv_operands(dk_TND, dv_TNE, peer_dkv),
    )


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the LSE and of sums of dK and dV."""
    return torch.promote_types(dtype, torch.float32)


def _zero_padding(device_plan: DevicePlan, rows: Tensor) -> None:
    """Set rows that belong to no sample, which no kernel writes, to zero."""
    if device_plan.padding is not None:
        rows.index_fill_(0, device_plan.padding, 0)
