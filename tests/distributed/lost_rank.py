"""Short-lived ranks of which one ends in the middle of a step; how the others end, and when.

The ranks of the session's pools can't serve here: a job that has lost a rank is over.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import libra
from libra.runtime import failure
from tests.distributed.ranks import PRELOAD

Stage = Literal["forward", "backward", "between microbatches", "planning", "user error"]

GROUP_TIMEOUT = timedelta(seconds=30)
START_SECONDS = 90.0
TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one rank ended."""

    error: str
    """`TypeName: message`; empty for the rank that was killed."""
    seconds: float
    """From the last rank's first step to the error; 0 for the lost rank."""
    exit_code: int | None


def lose(world_size: int, lost: int, stage: Stage, *, rank_0_hosts_store: bool) -> list[Ending]:
    """Run a job, lose rank `lost` in `stage` of its second step, and see how all ranks end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = [context.Pipe(duplex=False) for _ in range(world_size)]
    answers = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes: list[ForkServerProcess] = []
    try:
        for rank in range(world_size):
            to_tell = [sender for _, sender in ports[1:]] if rank_0_hosts_store else []
            process = context.Process(
                target=_rank,
                args=(rank, world_size, lost, stage, ports[rank][0], answers[rank][1]),
                kwargs={"host_store_for": to_tell if rank == 0 else []},
                daemon=True,
            )
            process.start()
            answers[rank][1].close()
            processes.append(process)
        if not rank_0_hosts_store:
            for _, sender in ports:
                sender.send(store.port)
        told = [_receive(receiver) for receiver, _ in answers]
        for process in processes:
            process.join(10.0)
        begin = max(stepped for stepped, _, _ in told)
        return [
            Ending(error=error, seconds=max(0.0, at - begin), exit_code=process.exitcode)
            for (_, error, at), process in zip(told, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(answer: Connection) -> tuple[float, str, float]:
    """When a rank had made its first step; its error and the time of it, if it told of one."""
    said: list[tuple[str, float]] = []
    deadline = time.monotonic() + START_SECONDS
    while answer.poll(max(0.0, deadline - time.monotonic())):
        try:
            said.append(answer.recv())
        except EOFError:
            break
    (_, stepped), *rest = said
    error, at = rest[-1] if rest else ("", 0.0)
    return stepped, error, at


def _rank(
    rank: int,
    world_size: int,
    lost: int,
    stage: Stage,
    port: Connection,
    answer: Connection,
    host_store_for: list[Connection],
) -> None:
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)  # torch tells of broken connections at length
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if host_store_for:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for other in host_store_for:
            other.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", port.recv(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # In proportion, and short enough for tests.
    failure._POLL, failure._GRACE_SECONDS = timedelta(seconds=0.3), 2.0
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    config = libra.PoolConfig(pool_size=world_size, block_size=8, chunks=2)
    pool = libra.SequencePool(mesh, config, timeout=GROUP_TIMEOUT)
    _step(rank, pool)
    answer.send(("stepped", time.monotonic()))
    try:
        _last_step(rank, pool, stage, rank == lost)
    except Exception as error:
        answer.send((f"{type(error).__name__}: {error}", time.monotonic()))
        answer.close()
        raise
    answer.send(("no error", time.monotonic()))


def _last_step(rank: int, pool: libra.SequencePool, stage: Stage, lost: bool) -> None:
    if stage == "planning":
        # The lost rank is told of nothing to plan: the others' planner threads wait for it.
        if lost:
            time.sleep(0.5)
            os._exit(9)
        pool.prefetch([[0, TOKENS]] * pool.config.pool_size)
        pool._runtime.prefetched[0].plan()
    elif stage == "user error":
        # The failing rank's own planner thread waits for the others, which wait for the rank.
        if lost:
            pool.prefetch([[0, TOKENS]] * pool.config.pool_size)
            raise KeyError("a mistake elsewhere")
        _step(rank, pool)
    elif stage == "between microbatches":
        if lost:
            os.kill(os.getpid(), signal.SIGKILL)
        _step(rank, pool)
    elif lost:
        _step(rank, pool, forward_ends=stage == "forward", backward_ends=stage == "backward")
    else:
        _step(rank, pool)


def _step(
    rank: int, pool: libra.SequencePool, forward_ends: bool = False, backward_ends: bool = False
) -> None:
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(TOKENS, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    with pool.microbatch([0, TOKENS] if rank == 0 else list(range(0, TOKENS + 1, 8))):
        if forward_ends:
            dist.all_to_all_single = _killing_after(1, dist.all_to_all_single)
        out = libra.libra_attention(q, k, v)
        if backward_ends:
            dist.all_to_all_single = _killing_after(1, dist.all_to_all_single)
        out.sum().backward()


def _killing_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    left = [calls]

    def killing(*args: Any, **kwargs: Any) -> Any:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*args, **kwargs)

    return killing
