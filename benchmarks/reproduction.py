"""The Libra paper's experiments in the cost model, on corpora with its published statistics.

    python benchmarks/reproduction.py --json reproduction.json

Attention benchmark: one layer, forward and backward, a barrier at every accumulation index, as in
the paper (heads 128 / kv / 256).  End to end: a whole model with a fixed global batch on 1 to 16
replicas, which wait for each other at every index.  Every figure is a ratio to Ulysses on the same
windows.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

import libra
from benchmarks.synthetic import BUFFER, CORPUS_1M, CORPUS_256K, LengthModel, generate_tokens
from libra.cost import CLUSTERS, MODELS, Model, Parallelism, published_table
from libra.cost.attention_time import AttentionTime
from libra.data.packing import Packs, pack_best_fit
from libra.simulate.compare import select_packs
from libra.simulate.predict import Setting, WindowSeconds, scheme_seconds
from libra.simulate.schemes import PREDICTED, SCHEMES


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to reproduce."""

    windows: int = 8
    """Windows of each experiment."""
    cluster: str = "h100"
    """Preset of the cost model."""
    model: str = "qwen3-30b-a3b"
    """Preset of the end-to-end runs."""
    seed: int = 0
    json: Path | None = None
    """Write the figures there too."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One context length of the paper."""

    name: str
    corpus: LengthModel
    parallelism: Parallelism
    kv_heads: int
    block_size: int
    worst: float
    """The paper's worst-step speedup of the straggler over Ulysses."""
    mean: float
    """Its mean over the steps."""
    end_to_end: float
    """Its largest end-to-end speedup."""


EXPERIMENTS = (
    Experiment(
        name="256K",
        corpus=CORPUS_256K,
        parallelism=Parallelism(dp=32, cp=8, global_batch=128, tokens=2**18),
        kv_heads=16,
        block_size=4096,
        worst=3.14,
        mean=2.91,
        end_to_end=1.79,
    ),
    Experiment(
        name="1M",
        corpus=CORPUS_1M,
        parallelism=Parallelism(dp=16, cp=16, global_batch=32, tokens=2**20),
        kv_heads=4,
        block_size=8192,
        worst=2.90,
        mean=2.57,
        end_to_end=2.54,
    ),
)


def main(args: Args) -> None:
    """Run all and print Markdown."""
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "cluster": args.cluster}
    for experiment in EXPERIMENTS:
        windows = list(corpus_windows(experiment, args))
        found[experiment.name] = {
            "attention": attention(experiment, windows, args),
            "end_to_end": end_to_end(experiment, windows, args),
        }
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def corpus_windows(experiment: Experiment, args: Args) -> Iterator[Packs]:
    """Windows of packs with the paper's statistics."""
    tokens, global_batch = experiment.parallelism.tokens, experiment.parallelism.global_batch
    wanted = global_batch * args.windows
    lengths = generate_tokens(experiment.corpus, 1.05 * wanted * tokens, args.seed)
    packs = pack_best_fit(lengths, tokens, buffer=BUFFER)
    for first in range(0, wanted, global_batch):
        yield select_packs(packs, np.arange(first, first + global_batch))


def configurations(experiment: Experiment) -> dict[str, libra.PoolConfig]:
    """The paper's settings and ours."""
    ours = libra.PoolConfig(pool_size=8, block_size=experiment.block_size, head_shards=1, chunks=4)
    return {
        "paper, H 1": ours.replace(placement="paper"),
        "paper, H 4": ours.replace(placement="paper", head_shards=4),
        "ours": ours,
        "ours, zigzag": ours.replace(shard_layout="zigzag"),
    }


def attention(experiment: Experiment, windows: Sequence[Packs], args: Args) -> list[dict[str, Any]]:
    """Straggler time of one layer over the accumulation indices of all windows."""
    cluster = CLUSTERS[args.cluster]
    layer = Model(
        name="one attention layer",
        layers=1,
        hidden=4096,
        q_heads=128,
        kv_heads=experiment.kv_heads,
        head_dim=256,
        ffn=1024,
        vocab=1000,
    )
    base = Setting(
        model=layer,
        parallelism=experiment.parallelism,
        time=AttentionTime(
            cluster=cluster, table=published_table(cluster, key_dim=256, value_dim=256)
        ),
        config=libra.PoolConfig(pool_size=8),
    )
    rows: list[dict[str, Any]] = []
    print(
        f"\n| {experiment.name} | settings | worst step | mean | without transfers |"
        "\n|---|---|---:|---:|---:|"
    )
    ulysses = _straggler(windows, base, "ulysses")
    assert ulysses is not None
    for scheme in PREDICTED:
        settings = configurations(experiment) if scheme in _PLACED else {"": base.config}
        for name, config in settings.items():
            times = _straggler(windows, replace(base, config=config), scheme)
            if times is None:
                continue
            row = {
                "scheme": SCHEMES[scheme].label,
                "settings": name,
                "worst": float(ulysses[0].max() / times[0].max()),
                "mean": float(ulysses[0].sum() / times[0].sum()),
                "compute": float(ulysses[0].sum() / times[1].sum()),
            }
            rows.append(row)
            figures = [f"{row[key]:.2f}x" for key in ("worst", "mean", "compute")]
            print(f"| {row['scheme']} | {name} | {' | '.join(figures)} |", flush=True)
    print(f"| the paper's Libra | | {experiment.worst:.2f}x | {experiment.mean:.2f}x | |")
    return rows


_PLACED = ("cluster", "tap", "tap_vrsp", "libra")


def _straggler(
    windows: Sequence[Packs], setting: Setting, scheme: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Seconds of the slowest replica at every index, and of the busiest worker's compute."""
    times, compute = [], []
    for packs in windows:
        found = scheme_seconds(packs, setting, scheme)
        if found is None:
            return None
        spread = setting.parallelism
        times.append(found.replicas(found.forward + found.backward, spread).max(axis=1))
        compute.append(found.replicas(found.compute, spread).max(axis=1))
    return np.concatenate(times), np.concatenate(compute)


def end_to_end(
    experiment: Experiment, windows: Sequence[Packs], args: Args
) -> list[dict[str, Any]]:
    """Throughput of a whole model with 1 to 16 replicas, and its efficiency over one replica's."""
    cluster, model = CLUSTERS[args.cluster], MODELS[args.model]
    table = published_table(cluster, key_dim=model.head_dim, value_dim=model.head_dim)
    ours = configurations(experiment)
    rows: list[dict[str, Any]] = []
    print(
        f"\n| {experiment.name}, {model.name}: DP | Ulysses | paper's settings | ours | ideal |"
        "\n|---|---:|---:|---:|---:|"
    )
    per_gpu: dict[str, float] = {}
    for dp in (1, 2, 4, 8, 16):
        spread = replace(experiment.parallelism, dp=dp, ep=8 if model.experts > 1 else 1)
        rates: dict[str, float] = {}
        for name, scheme, config in (
            ("ulysses", "ulysses", ours["ours"]),
            ("paper", "libra", ours["paper, H 4"]),
            ("ours", "libra", ours["ours"]),
            ("ideal", "ideal", ours["ours"]),
        ):
            setting = Setting(
                model=model,
                parallelism=spread,
                time=AttentionTime(cluster=cluster, table=table),
                config=config,
            )
            seconds = []
            for packs in windows[:3]:
                figures: WindowSeconds | None = scheme_seconds(packs, setting, scheme)
                assert figures is not None
                seconds.append(figures.step(setting).lockstep_seconds)
            rates[name] = 1 / float(np.mean(seconds)) / spread.ranks
        for name, rate in rates.items():
            per_gpu.setdefault(name, rate)
        shown = [
            f"{rates[name] / per_gpu[name]:.1%}, {rates[name] / rates['ulysses']:.2f}x"
            for name in rates
        ]
        print(f"| {dp} | {' | '.join(shown)} |", flush=True)
        rows.append({"dp": dp, **rates})
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args))
