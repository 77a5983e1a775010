"""One of several ranks on one device: a balanced pool against plain attention, and its planner.

NCCL refuses two ranks on one GPU.  Gloo takes CUDA tensors and passes them through pinned host
memory (its CUDA all-to-all), so that streams, waits and buffers are exercised as they are in
production; only the transport is another.  Started by `benchmarks/gpu_check.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

import libra
from benchmarks.gpu.layers import layer_overhead, seconds
from benchmarks.gpu.stopwatch import Watched
from benchmarks.overhead import plain_attention
from libra.bench.runner import random_rows
from libra.runtime.kernels import kernel_for
from libra.runtime.speed import synchronise


def pack_of(rank: int, tokens: int) -> list[int]:
    """Rank 0 has one long sample; the others have shorter and shorter ones, the last uneven."""
    length = tokens if rank == 0 else max(tokens // (8 * rank) - rank, 1)
    return [*range(0, tokens, length), tokens]


def check_outputs(
    mesh: DeviceMesh, args: argparse.Namespace, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Relative errors of outputs and gradients, the worst of all ranks."""
    device = torch.device(args.device)
    heads = libra.HeadShape(8, 2, 64, dtype.itemsize)
    q, k, v, dout = random_rows(args.tokens, heads, dtype, device, seed=dist.get_rank())
    bounds = pack_of(dist.get_rank(), args.tokens)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    due = plain_attention(leaves[0], leaves[1], leaves[2], bounds)
    due.backward(dout.double())
    found = []
    base = libra.PoolConfig(pool_size=dist.get_world_size())
    for chunks, backward in ((1, "retain"), (4, "retain"), (4, "refetch")):
        config = base.replace(chunks=chunks, backward=backward)
        pool = libra.SequencePool(mesh, config, heads=heads, kernel=args.kernel)
        with pool.microbatch(bounds) as microbatch:
            moved = float(microbatch.plan(heads).traffic.sum())
            out = libra.libra_attention(q, k, v)
            out.backward(dout)
        synchronise(device)
        pairs = [(out.detach(), due.detach())]
        for leaf, exact in zip((q, k, v), leaves, strict=True):
            assert leaf.grad is not None and exact.grad is not None
            pairs.append((leaf.grad, exact.grad))
            leaf.grad = None
        errors = torch.tensor(
            [float((got.double() - want).norm() / want.norm()) for got, want in pairs]
        )
        dist.all_reduce(errors.nan_to_num_(nan=torch.inf), op=dist.ReduceOp.MAX)
        found.append(
            {
                "chunks": chunks,
                "backward": backward,
                "moved_bytes": moved,
                "errors": dict(zip(("out", "dq", "dk", "dv"), errors.tolist(), strict=True)),
            }
        )
        pool.close()
    return found


def check_planner(mesh: DeviceMesh, args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Does planning the next microbatch hide behind the layers of this one?"""
    device, world = torch.device(args.device), dist.get_world_size()
    heads = libra.HeadShape(8, 2, 64, dtype.itemsize)
    pool = libra.SequencePool(
        mesh, libra.PoolConfig(pool_size=world), heads=heads, kernel=args.kernel
    )
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.5, 1.5, 40 * args.tokens // 100).astype(int), args.tokens)
    packs = libra.pack_sequential(np.maximum(lengths, 1), args.tokens, longer="drop")
    q, k, v, dout = random_rows(args.tokens, heads, dtype, device, seed=0)

    def bounds(step: int) -> list[Any]:
        return [packs.cu_seqlens((step * world + replica) % len(packs)) for replica in range(world)]

    def layers(microbatch: Any) -> None:
        for _ in range(args.layers):
            libra.libra_attention(q, k, v, microbatch=microbatch).backward(dout)

    cold, computed, waited = [], [], []
    for step in range(6):  # nothing is planned ahead; the first two warm up
        begun = time.perf_counter()
        microbatch = pool.microbatch(bounds(step)[dist.get_rank()])
        microbatch.plan(heads)
        cold.append(time.perf_counter() - begun)
        layers(microbatch)
    pool.prefetch(bounds(6))
    for step in range(6, 12):
        begun = time.perf_counter()
        microbatch = pool.microbatch(bounds(step)[dist.get_rank()])
        microbatch.plan(heads)
        waited.append(time.perf_counter() - begun)
        pool.prefetch(bounds(step + 1))
        computed.append(seconds(partial(layers, microbatch), device))
    pool.microbatch(bounds(12)[dist.get_rank()])
    pool.close()
    return {
        "samples": int(np.mean([len(cu) - 1 for cu in bounds(6)])),
        "layers": args.layers,
        "plan_seconds": float(np.median(cold[2:])),
        "layers_seconds": float(np.median(computed[1:])),
        "waited_seconds": float(np.median(waited[2:])),
    }


def check_overhead(
    mesh: DeviceMesh, args: argparse.Namespace, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """A layer against its kernels where work moves: the parts by number of segments."""
    device = torch.device(args.device)
    heads = libra.HeadShape(8, 2, 64, dtype.itemsize)
    tensors = random_rows(args.tokens, heads, dtype, device, seed=dist.get_rank())
    found = []
    for samples in (1, 8, 64, 512):
        watched = Watched(kernel_for(device, args.kernel))
        config = libra.PoolConfig(pool_size=dist.get_world_size())
        pool = libra.SequencePool(mesh, config, heads=heads, kernel=watched)
        # Rank 0's samples are all the longest that fit `samples`; the others' are shorter still.
        length = max(args.tokens // (samples if dist.get_rank() == 0 else 4 * samples), 1)
        microbatch = pool.microbatch([*range(0, args.tokens, length), args.tokens])
        plan = microbatch.plan(heads)
        row = layer_overhead(microbatch, watched, tensors, repeats=args.repeats)
        found.append({"samples": samples, "moved_bytes": float(plan.traffic.sum()), **row})
        pool.close()
    return found


def main() -> None:
    """Join the group, check, and let rank 0 write what was found."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "tokens", "layers", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("device", "dtype", "store", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--kernel")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.store}",
        rank=args.rank,
        world_size=args.world,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh(args.device, (args.world,), mesh_dim_names=("dp",))
    dtype = getattr(torch, args.dtype)
    found = {
        "world": args.world,
        "outputs": check_outputs(mesh, args, dtype),
        "planner": check_planner(mesh, args, dtype),
        "overhead": check_overhead(mesh, args, dtype),
    }
    dist.barrier()
    if args.rank == 0:
        Path(args.out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
