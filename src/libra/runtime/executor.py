"""The pipeliner: dispatch, attend and return, chunk by chunk, forward and backward.

    chunk          0           1           2
    dispatch    |=====|=====|=====|                        posted at once, in order
    attend      |local work ...|  0  |  1  |  2  |         what waits for nothing hides the first
    dispatch return                        |==0==|==1==|==2==|      only the last is exposed

Every worker of a pool issues the same collectives in the same order, whatever it has to compute.
K and V may travel in two hops, and dK and dV back: see `exchange`.
Legend: T local rows, R buffer rows, N heads, D key dim, E value dim; `_XW` is a tensor seen as lane
rows of width W.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.profiler import record_function

from libra.plan.route import LOCAL
from libra.runtime.buffers import fetched_size, fetched_views, output_views, outputs_size
from libra.runtime.exchange import (
    Homeward,
    Partial,
    add,
    blocks,
    collect,
    fetch,
    idle_chunks,
    land,
    place,
    send_home,
)
from libra.runtime.program import Program
from libra.runtime.transport import Flight, dispatch, give_back


def forward(
    program: Program,
    group: dist.ProcessGroup,
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of this worker's rows, wherever it is computed.

    Returns (out [T, N, E], flat LSE of the segments computed here, outputs computed for others,
    fetched Q/K/V); the last three are what `backward` needs, the last one optionally.
    """
    q_TND, k_TND, v_TNE = q_TND.contiguous(), k_TND.contiguous(), v_TNE.contiguous()
    heads, lanes = program.heads, program.route.lanes
    fetched_flat = q_TND.new_empty(fetched_size(program))
    remote_flat = q_TND.new_empty(outputs_size(program))
    fetched = fetched_views(fetched_flat, program)
    remote = output_views(remote_flat, program)
    out_TNE = q_TND.new_empty((q_TND.shape[0], heads.q, heads.value_dim))
    out_TNE[program.padding] = 0
    lse = q_TND.new_empty(
        program.route.lse_size, dtype=torch.promote_types(q_TND.dtype, torch.float32)
    )

    def attend(chunk: int) -> None:
        with record_function("libra::attend"):
            for launch in program.launches_of(chunk):
                at_q, at_kv = launch.q_buffer, launch.kv_buffer
                program.kernel.forward(
                    q_TND if at_q == LOCAL else fetched.q_RND[at_q],
                    k_TND if at_kv == LOCAL else fetched.k_RND[at_kv],
                    v_TNE if at_kv == LOCAL else fetched.v_RNE[at_kv],
                    launch.prepared,
                    scale,
                    out_TNE if at_q == LOCAL else remote[at_q],
                    lse[launch.lse],
                )

    inbound = [
        fetch(program, group, q_TND, k_TND, v_TNE, fetched, m) for m in range(program.chunks)
    ]
    returns: list[Flight] = []

    def post_return(chunk: int) -> None:
        rows_RW = remote[chunk].view(-1, lanes.heads * heads.value_dim)
        returns.append(give_back(program.q[chunk], rows_RW, group))

    early = idle_chunks(program, gradients=False)
    for chunk in range(early):  # so that who computes them need not wait for our own work to end
        post_return(chunk)
    attend(LOCAL)
    for chunk in range(program.chunks):
        land(program, group, inbound, k_TND, v_TNE, fetched, chunk)
        attend(chunk)
        if chunk >= early:
            post_return(chunk)
    out_XW = out_TNE.view(-1, lanes.heads * heads.value_dim)
    for message, flight in zip(program.q, returns, strict=True):
        place(out_XW, message, flight)
    return out_TNE, lse, remote_flat, fetched_flat


def backward(
    program: Program,
    group: dist.ProcessGroup,
    dout_TNE: torch.Tensor,
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    scale: float,
    out_TNE: torch.Tensor,
    lse: torch.Tensor,
    remote_flat: torch.Tensor,
    fetched_flat: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this worker's q, k and v, the same shapes.

    `fetched_flat` None fetches Q, K and V again.  dK and dV sum in fp32 (fp64 for fp64): this
    worker's own part, then the others' chunk by chunk in worker order, so that a run repeats itself
    bit for bit; relays add theirs in worker order too.
    """
    q_TND, k_TND, v_TNE = q_TND.contiguous(), k_TND.contiguous(), v_TNE.contiguous()
    dout_TNE = dout_TNE.contiguous()
    heads, lanes = program.heads, program.route.lanes
    refetch = fetched_flat is None
    if fetched_flat is None:
        fetched_flat = q_TND.new_empty(fetched_size(program))
    fetched = fetched_views(fetched_flat, program)
    remote = output_views(remote_flat, program)
    dremote = output_views(torch.empty_like(remote_flat), program)
    exact = torch.promote_types(q_TND.dtype, torch.float32)
    dq_TND = torch.empty_like(q_TND)
    dq_TND[program.padding] = 0
    dk_TND = torch.zeros_like(k_TND, dtype=exact)
    dv_TNE = torch.zeros_like(v_TNE, dtype=exact)
    dq_R = [torch.empty_like(buffer) for buffer in fetched.q_RND]
    dk_R = [torch.zeros_like(buffer, dtype=exact) for buffer in fetched.k_RND]
    dv_R = [torch.zeros_like(buffer, dtype=exact) for buffer in fetched.v_RNE]

    def attend(chunk: int) -> None:
        with record_function("libra::attend_backward"):
            for launch in program.launches_of(chunk):
                at_q, at_kv = launch.q_buffer, launch.kv_buffer
                program.kernel.backward(
                    dout_TNE if at_q == LOCAL else dremote[at_q],
                    q_TND if at_q == LOCAL else fetched.q_RND[at_q],
                    k_TND if at_kv == LOCAL else fetched.k_RND[at_kv],
                    v_TNE if at_kv == LOCAL else fetched.v_RNE[at_kv],
                    out_TNE if at_q == LOCAL else remote[at_q],
                    lse[launch.lse],
                    launch.prepared,
                    scale,
                    dq_TND if at_q == LOCAL else dq_R[at_q],
                    dk_TND if at_kv == LOCAL else dk_R[at_kv],
                    dv_TNE if at_kv == LOCAL else dv_R[at_kv],
                )

    dout_XW = dout_TNE.view(-1, lanes.heads * heads.value_dim)
    inbound_dout: list[Flight] = []
    inbound: list[list[Flight]] = []
    for chunk in range(program.chunks):
        into_RW = dremote[chunk].view(-1, dout_XW.shape[1])
        inbound_dout.append(dispatch(program.q[chunk], dout_XW, into_RW, group))
        if refetch:
            inbound.append(fetch(program, group, q_TND, k_TND, v_TNE, fetched, chunk))
    dk_XW = dk_TND.view(-1, lanes.kv_heads * heads.dim)
    dv_XW = dv_TNE.view(-1, lanes.kv_heads * heads.value_dim)
    returns_q: list[Flight] = []
    returns_kv: list[Homeward] = []
    waiting: list[Partial] = []

    def post_returns(chunk: int) -> None:
        for partial in waiting:
            returns_kv.append(send_home(program, group, partial, q_TND.dtype))
        waiting.clear()
        done = [n for n in range(program.chunks) if program.route.kv_done[n] == chunk]
        fresh = []
        for n in done:
            pairs = ((dk_R[n], dk_XW), (dv_R[n], dv_XW))
            fresh.append(collect(program, group, n, pairs, q_TND.dtype))
        rows_RW = dq_R[chunk].view(-1, lanes.heads * heads.dim)
        returns_q.append(give_back(program.q[chunk], rows_RW, group))
        for partial in fresh:
            if blocks(program, partial.buffer):
                waiting.append(partial)
            else:
                returns_kv.append(send_home(program, group, partial, q_TND.dtype))

    early = idle_chunks(program, gradients=True)
    for chunk in range(early):
        post_returns(chunk)
    attend(LOCAL)
    for chunk in range(program.chunks):
        with record_function("libra::wait"):
            inbound_dout[chunk].wait()
        if refetch:
            land(program, group, inbound, k_TND, v_TNE, fetched, chunk)
        attend(chunk)
        if chunk >= early:
            post_returns(chunk)
    for partial in waiting:
        returns_kv.append(send_home(program, group, partial, q_TND.dtype))
    dq_XW = dq_TND.view(-1, lanes.heads * heads.dim)
    for message, flight in zip(program.q, returns_q, strict=True):
        place(dq_XW, message, flight)
    for returned in returns_kv:
        message = program.kv[returned.partial.buffer]
        for local_XW, flight in zip(returned.partial.local_XW, returned.flights, strict=True):
            add(local_XW, message, flight.wait())
    return dq_TND, dk_TND.to(k_TND.dtype), dv_TNE.to(v_TNE.dtype)
