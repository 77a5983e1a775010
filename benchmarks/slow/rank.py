"""One rank behind a slow link: answers a line of JSON on stdin with one on stdout.

Started by `benchmarks/slow_link.py`; not a device_plan for users.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

import libra
from benchmarks.gpu.stopwatch import Watched
from benchmarks.slow.events import RETURNED, SENT, Log, Post
from libra.bench.runner import random_rows
from libra.runtime.kernels import kernel_for
from libra.runtime.kernels.interface import Kernel

MARK = "@libra "


class TimedWork:
    """A posted operation that writes down how long it was waited for."""

    def __init__(self, work: dist.Work, log: Log) -> None:
        self._work, self._log, self._place = work, log, len(log.posts)
        self._begun: float | None = None

    def is_completed(self) -> bool:
        """As `Work.is_completed`."""
        if self._begun is None:
            self._begun = time.perf_counter()
        return bool(self._work.is_completed())

    def wait(self, *timeout: timedelta) -> bool:
        """As `Work.wait`."""
        begun = self._begun = time.perf_counter() if self._begun is None else self._begun
        done = bool(self._work.wait(*timeout))
        self._log.waits[self._place] = (begun, time.perf_counter())
        return done


class TimedKernel(Watched):
    """A kernel that writes down when it ran, and can run its last calls again."""

    def __init__(self, kernel: Kernel, spy: Spy) -> None:
        super().__init__(kernel)
        self._spy = spy

    def _run(self, run: Callable[..., None], call: tuple[Any, ...]) -> None:
        begun = time.perf_counter()
        run(*call)
        self._spy.seen.log.kernels.append((begun, time.perf_counter()))
        self._spy.seen.calls.append((run, call))


@dataclass(slots=True)
class Seen:
    """One pass of this rank: its events, and what it takes to repeat its parts."""

    log: Log = field(default_factory=Log)
    calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    """Kernel calls."""
    messages: list[tuple[str, torch.Size, torch.Size, list[int], list[int]]] = field(
        default_factory=list
    )
    """Kind, shapes of what arrives and of what is sent, and their rows by rank."""


class Spy:
    """Sees every message and kernel call of this rank."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._post = dist.all_to_all_single
        dist.all_to_all_single = self._spied  # type: ignore[assignment]

    def messages_again(self, seen: Seen, kind: str, group: dist.ProcessGroup) -> dict[int, float]:
        """Post the pass's messages of one kind again, with nothing to compute; seconds of each, by
        place, as they arrive one behind the other."""
        chosen = [(at, message) for at, message in enumerate(seen.messages) if message[0] == kind]
        tensors = [(torch.zeros(out), torch.zeros(into)) for _, (_, out, into, _, _) in chosen]
        dist.barrier()
        last = time.perf_counter()
        works = [
            self._post(out, into, received, sent, group=group, async_op=True)
            for (out, into), (_, (_, _, _, received, sent)) in zip(tensors, chosen, strict=True)
        ]
        seconds = {}
        for (at, _), work in zip(chosen, works, strict=True):
            assert work is not None
            work.wait()
            now = time.perf_counter()
            seconds[at], last = now - last, now
        return seconds

    def _spied(
        self,
        out: torch.Tensor,
        into: torch.Tensor,
        received: list[int],
        sent: list[int],
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> TimedWork:
        kind = sys._getframe(1).f_code.co_name
        assert kind in (SENT, RETURNED)
        me = dist.get_rank(group)
        row = out.element_size() * out.shape[1]
        work = self._post(out, into, received, sent, group=group, async_op=async_op)
        assert work is not None
        timed = TimedWork(work, self.seen.log)
        others = [
            (count, give)
            for r, (count, give) in enumerate(zip(received, sent, strict=False))
            if r != me
        ]
        self.seen.log.posts.append(
            Post(
                kind,
                time.perf_counter(),
                row * sum(give for _, give in others),
                row * sum(count for count, _ in others),
            )
        )
        self.seen.messages.append((kind, out.shape, into.shape, received, sent))
        return timed


def kernels_again(seen: Seen) -> float:
    """Seconds of the pass's kernel calls with nothing to transfer."""
    dist.barrier()
    begun = time.perf_counter()
    for run, call in seen.calls:
        run(*call)
    return time.perf_counter() - begun


class Worker:
    """This rank's tensors and pools."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.spy = Spy()
        self.mesh = init_device_mesh("cpu", (args.world,), mesh_dim_names=("dp",))
        self.pools: dict[int, tuple[libra.SequencePool, Any]] = {}
        heads = self.heads = libra.HeadShape(args.heads, args.kv_heads, args.head_dim, 4)
        cpu = torch.device("cpu")
        rows = random_rows(args.tokens, heads, torch.float32, cpu, seed=args.rank)
        self.q, self.k, self.v, self.dout = rows
        self.outputs: torch.Tensor | None = None

    def microbatch(self, chunks: int) -> tuple[libra.SequencePool, Any]:
        """Pool and microbatch for M = `chunks`, planned."""
        if chunks not in self.pools:
            args = self.args
            config = libra.PoolConfig(pool_size=args.world, chunks=chunks)
            heads = self.heads
            timed = TimedKernel(kernel_for(torch.device("cpu")), self.spy)
            pool = libra.SequencePool(self.mesh, config, heads=heads, kernel=timed)
            sample = args.tokens if args.rank == 0 else args.light_sample
            bounds = [*range(0, args.tokens, sample), args.tokens]
            microbatch = pool.microbatch(bounds)
            microbatch.plan(heads)
            self.pools[chunks] = pool, microbatch
        return self.pools[chunks]

    def measure(self, chunks: int, repeats: int) -> dict[str, Any]:
        """Forward and backward `repeats` times, after one that does not count."""
        pool, microbatch = self.microbatch(chunks)
        group = pool.groups.exchange
        answer: dict[str, Any] = {
            way: {"events": [], "compute": [], "alone": []} for way in ("forward", "backward")
        }
        out: torch.Tensor | None = None

        def forward() -> None:
            nonlocal out
            out = libra.libra_attention(self.q, self.k, self.v, microbatch=microbatch)

        def backward() -> None:
            assert out is not None
            out.backward(self.dout)

        for turn in range(repeats + 1):
            passes = {"forward": self._timed(forward), "backward": self._timed(backward)}
            for way, (events, seen) in passes.items():  # after both: kernels write their outputs
                compute = kernels_again(seen)
                alone = self.spy.messages_again(seen, SENT, group)
                alone |= self.spy.messages_again(seen, RETURNED, group)
                if turn:
                    answer[way]["events"].append(events)
                    answer[way]["compute"].append(compute)
                    answer[way]["alone"].append(alone)
            assert out is not None
            self._check(out.detach())
            for leaf in (self.q, self.k, self.v):
                leaf.grad = None
        return answer

    def _timed(self, run: Callable[[], None]) -> tuple[dict[str, Any], Seen]:
        """The fields of `RankEvents`, and what repeats the pass."""
        seen = self.spy.seen = Seen()
        dist.barrier()
        before = threads()
        start = time.perf_counter()
        run()
        end = time.perf_counter()
        after = threads()
        main = str(threading.get_native_id())
        spent = {
            tid: [b - a for a, b in zip(before.get(tid, (0, 0)), now, strict=True)]
            for tid, now in after.items()
        }
        others = [seconds for tid, seconds in spent.items() if tid != main]
        events = {
            **dataclasses.asdict(seen.log),
            "start": start,
            "end": end,
            "main_cpu": spent[main][0],
            "main_delay": spent[main][1],
            "other_cpu": sum(cpu for cpu, _ in others),
            "other_delay": sum(delay for _, delay in others),
        }
        return events, seen

    def _check(self, out: torch.Tensor) -> None:
        if self.outputs is None:
            self.outputs = out
        torch.testing.assert_close(out, self.outputs, rtol=1e-4, atol=1e-5)


def threads() -> dict[str, tuple[float, float]]:
    """CPU seconds and run-queue delay of every thread of this process, where the kernel tells."""
    found = {}
    for tid in os.listdir("/proc/self/task"):
        try:
            text = Path(f"/proc/self/task/{tid}/schedstat").read_text()
        except OSError:
            text = "0 0 0"
        cpu, delay, _ = text.split()
        found[tid] = (int(cpu) / 1e9, int(delay) / 1e9)
    return found


def yield_to_transfers(nice: int) -> None:
    """Let every other thread run before this one, which computes."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def main() -> None:
    """Join the group, then answer until stdin ends."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "tokens", "light-sample", "heads", "kv-heads", "head-dim"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--store", required=True, help="address:port of rank 0's store")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.store}",
        rank=args.rank,
        world_size=args.world,
        timeout=timedelta(seconds=120),
    )
    worker = Worker(args)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "measure":
            answer = worker.measure(order["chunks"], order["repeats"])
        elif order["do"] == "connect":
            worker.microbatch(order["chunks"])
            answer = {}
        else:
            yield_to_transfers(order["nice"])
            answer = {}
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
