"""Straggler time of one attention layer, Ulysses against Libra, on the same windows of real
lengths.

    torchrun --standalone --nproc-per-node 2 benchmarks/attention.py

Every GA step runs forward and backward of both schemes in turn (the order alternates), each behind
a barrier; the step's time is its slowest rank's.  Beside the measured speedup stands the one that
the plans' loads predict: the ratio of the summed largest loads.  All figures come from one run, so
that the machine's speed drops out.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

import libra


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to measure."""

    lengths: Path = Path(__file__).parent.parent / "tests" / "data" / "lengths-code.npy"
    """Sample lengths in tokens, .npy; samples longer than `tokens` are dropped."""
    tokens: int = 8192
    """L, tokens of one pack."""
    cp: int = 1
    """Context-parallel ranks of one pack."""
    global_batch: int = 8
    """Packs of one optimizer step."""
    windows: int = 2
    """Optimizer steps to run."""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    warmup: int = 1
    """Steps that are run and not counted."""
    pool: libra.PoolConfig = libra.PoolConfig(pool_size=2, block_size=512, head_shards=1, chunks=4)
    json: Path | None = None
    """Write the figures there too."""


@dataclass(frozen=True)
class Step:
    """One GA step of one scheme."""

    seconds: float
    """Slowest rank, forward and backward."""
    load: int
    """Largest load of a worker of any pool, causal pairs times heads."""
    bytes_moved: int
    """Forward bytes of all pools."""


def main() -> None:
    """Run under torchrun."""
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    pools = {
        "ulysses": libra.SequencePool(
            mesh, libra.PoolConfig(pool_size=1, placement="ulysses", chunks=1)
        ),
        "libra": libra.SequencePool(mesh, args.pool),
    }
    lengths = np.load(args.lengths, allow_pickle=False)
    packs = libra.pack_sequential(lengths, args.tokens, longer="drop")
    sampler = libra.PoolSampler(
        packs,
        global_batch=args.global_batch,
        dp_rank=rank // args.cp,
        dp_size=world // args.cp,
        pool_size=args.pool.pool_size,
    )
    steps = args.windows * args.global_batch // (world // args.cp)
    schedule = sampler.schedule()[: steps + args.warmup]
    measured: dict[str, list[Step]] = {name: [] for name in pools}
    for index, packs_of_step in enumerate(schedule):
        bounds = packs.cu_seqlens(int(packs_of_step[rank // args.cp]))
        order = list(pools) if index % 2 else list(pools)[::-1]
        for name in order:
            measured[name].append(run_step(pools[name], bounds, args, rank % args.cp))
    if rank == 0:
        report(args, {name: steps[args.warmup :] for name, steps in measured.items()})
    for pool in pools.values():
        pool.close()
    dist.destroy_process_group()


def run_step(pool: libra.SequencePool, bounds: np.ndarray, args: Args, cp_rank: int) -> Step:
    """One layer, forward and backward, on this rank's rows."""
    rows = len(libra.local_positions(args.tokens, args.cp, cp_rank, pool.config.shard_layout))
    dtype = getattr(torch, args.dtype)
    q = torch.randn(rows, args.heads, args.head_dim, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(rows, args.kv_heads, args.head_dim, dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    dout = torch.randn(rows, args.heads, args.head_dim, dtype=dtype)
    heads = libra.HeadShape(args.heads, args.kv_heads, args.head_dim, dtype.itemsize)
    with pool.layout(bounds, tokens=args.tokens) as layout:
        plan = layout.plan(heads)  # made ahead of the device in training: not part of the time
        dist.barrier()
        begin = time.perf_counter()
        libra.libra_attention(q, k, v).backward(dout)
        seconds = time.perf_counter() - begin
    facts = torch.tensor([seconds, float(plan.load.max())], dtype=torch.float64)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    moved = torch.tensor([plan.traffic.sum() / len(plan.load)])
    dist.all_reduce(moved)
    return Step(seconds=float(facts[0]), load=int(facts[1]), bytes_moved=int(moved))


def report(args: Args, measured: dict[str, list[Step]]) -> None:
    """Print the table and write the figures."""
    total = {name: sum(step.seconds for step in steps) for name, steps in measured.items()}
    load = {name: sum(step.load for step in steps) for name, steps in measured.items()}
    speedup, predicted = total["ulysses"] / total["libra"], load["ulysses"] / load["libra"]
    table = Table(title=f"Attention, {args.tokens} tokens a pack, forward and backward")
    for column in ("scheme", "steps", "straggler s/step", "largest load", "MB moved/step"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    for name, steps in measured.items():
        table.add_row(
            name,
            str(len(steps)),
            f"{total[name] / len(steps):.4f}",
            f"{load[name] / len(steps):.3g}",
            f"{np.mean([step.bytes_moved for step in steps]) / 1e6:.1f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"measured speedup {speedup:.3f}, predicted by the loads {predicted:.3f}: "
        f"{speedup / predicted:.1%} of it"
    )
    if args.json is not None:
        figures = {
            "ranks": int(os.environ["WORLD_SIZE"]),
            "tokens": args.tokens,
            "pool": repr(args.pool),
            "straggler_seconds": total,
            "largest_load": load,
            "speedup": speedup,
            "predicted": predicted,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
