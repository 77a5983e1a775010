"""What Libra costs where nothing needs to move: against a plain per-sample loop, on the same rows.

    torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py

Every replica holds a pack of the same lengths, so the pool is balanced and all work stays at home.
Forward and backward of `libra_attention` and of a loop over `scaled_dot_product_attention` run in
turn behind a barrier; a step's time is its slowest rank's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch.distributed.device_mesh import init_device_mesh

import libra
from libra.bench.runner import random_rows


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to measure."""

    lengths: Path = Path(__file__).parent.parent / "tests" / "data" / "lengths-code.npy"
    """Sample lengths in tokens, .npy; samples longer than `tokens` are dropped."""
    tokens: int = 8192
    packs: int = 6
    repeats: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]
) -> torch.Tensor:
    """One call of PyTorch's own attention a sample; [tokens, heads, head dim]."""
    outputs = [
        F.scaled_dot_product_attention(
            *(tensor[start:stop].transpose(0, 1)[None] for tensor in (q, k, v)),
            is_causal=True,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for start, stop in itertools.pairwise(bounds)
    ]
    return torch.cat(outputs)


def main() -> None:
    """Run under torchrun."""
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    config = libra.PoolConfig(pool_size=world)
    heads = libra.HeadShape(args.heads, args.kv_heads, args.head_dim, 4)
    pool = libra.SequencePool(mesh, config, heads=heads)
    packs = libra.pack_sequential(
        np.load(args.lengths, allow_pickle=False), args.tokens, longer="drop"
    )
    rank = dist.get_rank()
    q, k, v, dout = random_rows(args.tokens, heads, torch.float32, torch.device("cpu"), seed=rank)

    def seconds(attend: Callable[[], torch.Tensor]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        attend().backward(dout)
        taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    ratios = []
    for pack in [0, *range(args.packs)]:  # the first once more, as warm-up
        bounds = packs.cu_seqlens(pack)
        with pool.microbatch(bounds) as microbatch:
            assert not microbatch.plan().traffic.any()
            plain, ours = [], []
            for _ in range(args.repeats):
                plain.append(seconds(partial(plain_attention, q, k, v, bounds.tolist())))
                ours.append(seconds(partial(libra.libra_attention, q, k, v)))
        ratios.append(min(ours) / min(plain))
    if rank == 0:
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios[1:])
        print(f"libra / plain, {args.tokens} tokens: {statistics.median(ratios[1:]):.3f} ({each})")
    pool.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
