"""The pipeliner: dispatch, attend and return, chunk by chunk, forward and backward.

    chunk          0           1           2
    dispatch    |=====|=====|=====|                        posted at once, in order
    attend      |local work ...|  0  |  1  |  2  |         what waits for nothing hides the first
    dispatch return                        |==0==|==1==|==2==|      only the last is exposed

Every worker of a pool issues the same collectives in the same order, whatever it has to compute.
K and V may travel in two hops, see `exchange`, and so may their gradients, see `gradients`.
Legend: T local rows, N heads, D key dim, E value dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from libra.plan.rank_plan import LOCAL
from libra.runtime.buffers import fetched_chunks, kv_chunks, q_chunks
from libra.runtime.device_plan import DevicePlan
from libra.runtime.exchange import Exchange, Return
from libra.runtime.gradients import Homeward, Partial, Sum
from libra.runtime.kernels.interface import Buffers, Grads
from libra.runtime.torch_private import stage
from libra.runtime.workspace import Workspace

Tensor = torch.Tensor


def forward(
    device_plan: DevicePlan,
    group: dist.ProcessGroup,
    workspace: Workspace,
    q_TND: Tensor,
    k_TND: Tensor,
    v_TNE: Tensor,
    scale: float,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of this worker's rows, wherever it is computed.

    Returns (out [T, N, E], flat LSE of the segments computed here, outputs computed for others,
    fetched Q/K/V).  `keep` says that `backward` will need the last three, or all but the fetched
    where it fetches again; what it does not need is empty.
    """
    q_TND, k_TND, v_TNE = q_TND.contiguous(), k_TND.contiguous(), v_TNE.contiguous()
    heads, memory = device_plan.heads, device_plan.memory
    keep_fetched = keep and not device_plan.refetch
    from_workspace = memory.forward
    from_workspace += (0 if keep_fetched else memory.fetched) + (0 if keep else memory.outputs)
    (space,) = workspace.open(q_TND.device, (q_TND.dtype, from_workspace))

    def buffer(kept: bool, elements: int) -> Tensor:
        return q_TND.new_empty(elements) if kept else space.take(elements)

    fetched_flat, remote_flat = buffer(keep_fetched, memory.fetched), buffer(keep, memory.outputs)
    fetched = fetched_chunks(fetched_flat, device_plan)
    remote = q_chunks(remote_flat, device_plan, heads.value_dim)
    out_TNE = q_TND.new_empty((q_TND.shape[0], heads.q, heads.value_dim))
    _zero_padding(device_plan, out_TNE)
    lse = q_TND.new_empty(device_plan.rank_plan.lse_size, dtype=_exact(q_TND.dtype))

    def attend(chunk: int) -> None:
        for launch in device_plan.launches_of(chunk):
            at_q, at_kv = launch.q_buffer, launch.kv_buffer
            with stage("attend"):
                buffers = Buffers(
                    q_TND if at_q == LOCAL else fetched.q_RND[at_q],
                    k_TND if at_kv == LOCAL else fetched.k_RND[at_kv],
                    v_TNE if at_kv == LOCAL else fetched.v_RNE[at_kv],
                    out_TNE if at_q == LOCAL else remote[at_q],
                    lse[launch.lse],
                )
                device_plan.kernel.forward(launch.prepared, buffers, scale)

    exchange = Exchange(device_plan, group, space)
    inbound = [
        exchange.fetch(chunk, q_TND, k_TND, v_TNE, fetched) for chunk in range(device_plan.chunks)
    ]
    returns: list[Return] = []
    early = device_plan.idle_forward
    for chunk in range(early):  # so that who computes them need not wait for our own work to end
        returns += exchange.post_return(chunk, remote[chunk], out_TNE)
    attend(LOCAL)
    for chunk in range(device_plan.chunks):
        exchange.land(chunk, inbound)
        attend(chunk)
        if chunk >= early:
            returns += exchange.post_return(chunk, remote[chunk], out_TNE)
    for returned in returns:
        returned.finish()
    return (
        out_TNE,
        lse if keep else lse.new_empty(0),
        remote_flat if keep else q_TND.new_empty(0),
        fetched_flat if keep_fetched else q_TND.new_empty(0),
    )


def backward(
    device_plan: DevicePlan,
    group: dist.ProcessGroup,
    workspace: Workspace,
    dout_TNE: Tensor,
    q_TND: Tensor,
    k_TND: Tensor,
    v_TNE: Tensor,
    scale: float,
    out_TNE: Tensor,
    lse: Tensor,
    remote_flat: Tensor,
    fetched_flat: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this worker's q, k and v, the same shapes.

    dK and dV sum in fp32 (fp64 for fp64): this worker's own part, then the others' chunk by chunk
    in worker order, so that a run repeats itself bit for bit; relays add theirs in worker order
    too.
    """
    q_TND, k_TND, v_TNE = q_TND.contiguous(), k_TND.contiguous(), v_TNE.contiguous()
    dout_TNE = dout_TNE.contiguous()
    heads, memory = device_plan.heads, device_plan.memory
    exact_dtype = _exact(q_TND.dtype)
    exact, space = workspace.open(
        q_TND.device, (exact_dtype, memory.exact), (q_TND.dtype, memory.backward)
    )
    if device_plan.refetch:
        fetched_flat = space.take(memory.fetched)
    fetched = fetched_chunks(fetched_flat, device_plan)
    remote = q_chunks(remote_flat, device_plan, heads.value_dim)
    dremote = q_chunks(space.take(memory.outputs), device_plan, heads.value_dim)
    dq_R = q_chunks(space.take(memory.fetched_q), device_plan, heads.dim)
    dk_R, dv_R = kv_chunks(exact.take(memory.fetched_kv).zero_(), device_plan)
    dq_TND = torch.empty_like(q_TND)
    _zero_padding(device_plan, dq_TND)
    if exact_dtype == q_TND.dtype:
        dk_TND, dv_TNE = torch.zeros_like(k_TND), torch.zeros_like(v_TNE)
    else:  # the results are narrower
        dk_TND, dv_TNE = (exact.take(*local.shape).zero_() for local in (k_TND, v_TNE))

    def attend(chunk: int) -> None:
        for launch in device_plan.launches_of(chunk):
            at_q, at_kv = launch.q_buffer, launch.kv_buffer
            with stage("attend_backward"):
                buffers = Buffers(
                    q_TND if at_q == LOCAL else fetched.q_RND[at_q],
                    k_TND if at_kv == LOCAL else fetched.k_RND[at_kv],
                    v_TNE if at_kv == LOCAL else fetched.v_RNE[at_kv],
                    out_TNE if at_q == LOCAL else remote[at_q],
                    lse[launch.lse],
                )
                grads = Grads(
                    dout_TNE if at_q == LOCAL else dremote[at_q],
                    dq_TND if at_q == LOCAL else dq_R[at_q],
                    dk_TND if at_kv == LOCAL else dk_R[at_kv],
                    dv_TNE if at_kv == LOCAL else dv_R[at_kv],
                )
                device_plan.kernel.backward(launch.prepared, buffers, grads, scale)

    exchange = Exchange(device_plan, group, space)
    inbound, inbound_dout = [], []
    for chunk in range(device_plan.chunks):
        inbound_dout.append(exchange.send_along(chunk, dout_TNE, dremote[chunk]))
        if device_plan.refetch:
            inbound.append(exchange.fetch(chunk, q_TND, k_TND, v_TNE, fetched))
    wide = [exact.take(elements) for elements in memory.wide]
    homeward = Homeward(device_plan, group, space, *wide)
    returns: list[Return | Sum] = []
    waiting: list[Partial] = []

    def post_returns(chunk: int) -> None:
        for partial in waiting:
            returns.extend(homeward.send_home(partial))
        waiting.clear()
        fresh = [
            homeward.collect(n, sums[n], local)
            for n in device_plan.kv_returns[chunk]
            for sums, local in ((dk_R, dk_TND), (dv_R, dv_TNE))
        ]
        returns.extend(exchange.post_return(chunk, dq_R[chunk], dq_TND))
        for partial in fresh:
            if device_plan.blocks[partial.buffer]:
                waiting.append(partial)
            else:
                returns.extend(homeward.send_home(partial))

    early = device_plan.idle_backward  # as in forward
    for chunk in range(early):
        post_returns(chunk)
    attend(LOCAL)
    for chunk in range(device_plan.chunks):
        if inbound_dout[chunk]:
            with stage("wait"):
                for flight in inbound_dout[chunk]:
                    flight.wait()
        if device_plan.refetch:
            exchange.land(chunk, inbound)
        attend(chunk)
        if chunk >= early:
            post_returns(chunk)
    for partial in waiting:
        returns.extend(homeward.send_home(partial))
    for returned in returns:
        returned.finish()
    return dq_TND, dk_TND.to(k_TND.dtype), dv_TNE.to(v_TNE.dtype)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What sums and the LSE are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _zero_padding(device_plan: DevicePlan, rows: Tensor) -> None:
    """Set rows that belong to no sample, which no kernel writes, to zero."""
    if device_plan.padding is not None:
        rows.index_fill_(0, device_plan.padding, 0)
