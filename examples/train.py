"""Train the decoder on the standard library's source with a baseline and, step by step, with Libra.

    torchrun --standalone --nproc-per-node 2 examples/train.py --steps 10 --tokens 8192

Both schemes start from the same weights and train on the same packs; only the `PoolConfig` differs.
They take turns at each step:

    baseline   Ulysses inside each context-parallel group (CP 1: each rank attends to its own pack)
    libra      one pool over all replicas

Rank 0 prints one JSON object a line: first `{"event": "start", ...}`, then `{"event": "step", ...}`
for each scheme and step, with lists of the figures of all ranks.  `libra demo` runs this file and
prints a table of those lines.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import corpus
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from decoder import Decoder, DecoderConfig, sample_positions
from stopwatch import timed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import libra
from libra.runtime.speed import Stopwatch

Scheme = Literal["baseline", "libra"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Sizes and length of the training."""

    cp: int = 1
    """Context-parallel size: ranks that share one pack.  Must divide the number of ranks."""

    steps: int = 10
    """Optimizer steps of each scheme."""

    tokens: int = 8192
    """L: tokens of a pack, one pack per data-parallel replica and step."""

    block_size: int = 512
    """B of the Libra pool."""

    chunks: int = 2
    """M of the Libra pool."""

    learning_rate: float = 3e-3

    seed: int = 0
    """Seed of the weights, the samples and the order of the packs."""

    schemes: tuple[Scheme, ...] = ("baseline", "libra")


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Every pack of the run, the same on all ranks, and the pack of this replica at each step."""

    packs: libra.Packs
    token_ids: np.ndarray[Any, np.dtype[np.int64]]
    order: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One scheme's model, with stopwatches around its attention calls."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    pool: libra.SequencePool
    watches: tuple[Stopwatch, Stopwatch]
    """Wall seconds, with waits for other ranks; CPU seconds, which count only what this process
    computes, so that other work on a busy machine does not show.
    """


def main(config: TrainConfig) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if config.cp < 1 or ranks % config.cp:
        raise ValueError(
            f"--cp {config.cp} does not divide the {ranks} ranks that torchrun started"
        )
    mesh = init_device_mesh("cpu", (ranks // config.cp, config.cp), mesh_dim_names=("dp", "cp"))
    data = prepare_data(config, mesh)
    shape = DecoderConfig(vocab=corpus.VOCAB)
    report({"event": "start", "ranks": ranks, "config": asdict(config), "decoder": asdict(shape)})
    runs = {scheme: start_run(scheme, config, shape, mesh) for scheme in config.schemes}
    for run in runs.values():
        # One untimed pass touches memory, loads the compiled planner and connects ranks.
        forward_backward(run, data, data.order[0], mesh)
        run.optimizer.zero_grad()
    for step, pack in enumerate(data.order):
        # Schemes take turns, so that other work on this machine slows both equally.
        for scheme, run in runs.items():
            figures = train_step(run, data, pack, mesh)
            report({"event": "step", "scheme": scheme, "step": step, **figures})
    for run in runs.values():
        run.pool.close()
    dist.destroy_process_group()


def prepare_data(config: TrainConfig, mesh: DeviceMesh) -> Data:
    """Read the corpus, pack it, and let the sampler choose this replica's packs."""
    replicas = mesh["dp"].size()
    wanted = config.steps * replicas * config.tokens
    text = corpus.load(tokens=wanted, longest=config.tokens, seed=config.seed)
    packs = libra.pack_sequential(text.lengths, config.tokens)
    sampler = libra.PoolSampler(
        packs,
        global_batch=replicas,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=replicas,
        pool_size=replicas,
        seed=config.seed,
    )
    return Data(packs=packs, token_ids=text.tokens, order=list(sampler)[: config.steps])


def pool_config(scheme: Scheme, config: TrainConfig, replicas: int) -> libra.PoolConfig:
    """The configuration of a scheme, which is all that differs between schemes."""
    if scheme == "baseline":
        return libra.PoolConfig(pool_size=1, placement="ulysses", chunks=1)
    return libra.PoolConfig(pool_size=replicas, block_size=config.block_size, chunks=config.chunks)


def start_run(scheme: Scheme, config: TrainConfig, shape: DecoderConfig, mesh: DeviceMesh) -> Run:
    """A freshly drawn model and its pool; every scheme draws the same weights."""
    torch.manual_seed(config.seed)
    watches = (Stopwatch(), Stopwatch(time.process_time))
    model = Decoder(shape, timed(libra.libra_attention, watches))
    return Run(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95)),
        pool=libra.SequencePool(mesh, pool_config(scheme, config, mesh["dp"].size())),
        watches=watches,
    )


def train_step(run: Run, data: Data, pack: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Take one optimizer step; returns its loss, and for all other figures one value a rank."""
    dist.barrier()  # so that no step includes waiting for the step before
    for watch in run.watches:
        watch.total()  # discards the time before this step
    started = time.perf_counter()
    loss, plan = forward_backward(run, data, pack, mesh)
    run.optimizer.step()
    run.optimizer.zero_grad()
    seconds = time.perf_counter() - started
    worker = run.pool.membership.worker
    times, loads, moved = gather(
        [*(watch.total() for watch in run.watches), seconds],
        [plan.load[worker]],
        plan.traffic[:, worker].sum(axis=1),
    )
    return {
        "loss": loss,
        "attention_seconds": times[:, 0].tolist(),
        "attention_cpu_seconds": times[:, 1].tolist(),
        "step_seconds": times[:, 2].tolist(),
        "load": loads[:, 0].tolist(),
        "bytes_sent": dict(zip(("q", "kv", "o"), moved.T.tolist(), strict=True)),
    }


def forward_backward(
    run: Run, data: Data, pack: int, mesh: DeviceMesh
) -> tuple[float, libra.PoolPlan]:
    """Loss of a step, averaged over the tokens of all replicas, and the plan of its attention.

    Leaves its gradients, summed over all ranks, in the model.
    """
    model, tokens, cu_seqlens = run.model, data.packs.tokens, data.packs.cu_seqlens(pack)
    cp_size, cp_rank = mesh["cp"].size(), mesh.get_local_rank("cp")
    pack_ids = data.token_ids[pack * tokens : (pack + 1) * tokens]  # packs cut the text every L
    here = libra.local_positions(tokens, cp_size, cp_rank)
    labels = torch.from_numpy(libra.local_labels(pack_ids, cu_seqlens, cp_size, cp_rank))
    positions = torch.from_numpy(sample_positions(cu_seqlens, here))

    targets = (labels >= 0).sum()
    dist.all_reduce(targets)
    with run.pool.microbatch(cu_seqlens, tokens=tokens) as microbatch:
        logits = model(torch.from_numpy(pack_ids[here]), positions)
        loss = F.cross_entropy(logits, labels, reduction="sum") / targets
        loss.backward()
        plan = microbatch.plan()
    sum_gradients(model)
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item(), plan


def sum_gradients(model: Decoder) -> None:
    """Data parallelism in its simplest form: one all-reduce of all gradients."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def gather(*figures: Any) -> list[np.ndarray[Any, Any]]:
    """Every rank's figures, one array [ranks, values] per argument."""
    gathered = []
    for values in figures:
        mine = torch.from_numpy(np.asarray(values))
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        gathered.append(torch.stack(parts).numpy())
    return gathered


def report(event: dict[str, Any]) -> None:
    """Print one line of JSON, from rank 0 only."""
    if dist.get_rank() == 0:
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main(tyro.cli(TrainConfig))
