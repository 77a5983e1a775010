"""What the placements move and how they balance, over all pools of all windows of real lengths.

    python benchmarks/placement.py --json placement.json

Every pool is planned by the placement of each row; figures are means over the pools unless they
say worst.  `code` is the corpus on which the placement was developed, `mix` is not.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

import libra
from benchmarks.synthetic import cut_to
from libra.data.packing import Packs
from libra.data.pools import make_pools
from libra.plan.plan_pool import PoolPlan, plan_pool
from libra.plan.traffic_bound import traffic_bound

DATA = Path(__file__).parents[1] / "tests" / "data"


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to measure."""

    code: Path = DATA / "lengths-code.npy"
    """Lengths of source files, packed in sequence; longer ones than a pack are dropped."""
    mix: Path = DATA / "lengths-mix.npy"
    """Lengths of code, documents, books and whole directories, packed whole by best fit; longer
    ones than a pack are cut to its length first.
    """
    windows: int | None = None
    """Windows of each corpus; None for all."""
    json: Path | None = None
    """Write the figures there too."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of training run."""

    corpus: Literal["code", "mix"]
    tokens: int
    global_batch: int
    cp_size: int
    kv_heads: int
    pool_size: int = 8
    block_size: int

    @property
    def title(self) -> str:
        return (
            f"{self.corpus}, {self.tokens // 1024}K, CP {self.cp_size}, P {self.pool_size}, "
            f"{self.kv_heads} kv heads"
        )

    @property
    def heads(self) -> libra.HeadShape:
        return libra.HeadShape(128, self.kv_heads, 256)


CASES = (
    Case(corpus="code", tokens=2**18, global_batch=128, cp_size=8, kv_heads=16, block_size=4096),
    Case(corpus="mix", tokens=2**18, global_batch=128, cp_size=8, kv_heads=16, block_size=4096),
    Case(corpus="code", tokens=2**20, global_batch=32, cp_size=16, kv_heads=4, block_size=8192),
    Case(corpus="mix", tokens=2**20, global_batch=32, cp_size=16, kv_heads=4, block_size=8192),
)


SHOWN: tuple[tuple[str, str, Callable[[list[float]], float], int], ...] = (
    ("imbalance", "imbalance", statistics.fmean, 3),
    ("worst", "imbalance", max, 3),
    ("GB", "gigabytes", statistics.fmean, 1),
    ("between nodes", "between_nodes", statistics.fmean, 1),
    ("over bound", "over_bound", statistics.fmean, 2),
    ("sent, worst", "sent", max, 2),
    ("received, worst", "received", max, 2),
    ("ms", "milliseconds", statistics.median, 1),
)
"""(column, figure, what is shown of all pools, decimals)."""


def main(args: Args) -> None:
    """Measure every case and print it as Markdown."""
    written: list[dict[str, Any]] = []
    columns = ("case (pools)", "placement", *(column for column, *_ in SHOWN))
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for case in CASES:
        packs = pack(np.load(getattr(args, case.corpus)), case)
        pools = [pool for window in windows(packs, case)[: args.windows] for pool in window]
        title = f"{case.title} ({len(pools)})"
        for name, config in placements(case):
            plan_once(packs, pools[0], case, config)  # warm
            rows = [pool_figures(*plan_once(packs, pool, case, config)) for pool in pools]
            figures = {key: [row[key] for row in rows if key in row] for _, key, *_ in SHOWN}
            cells = [f"{over(figures[key]):.{digits}f}" for _, key, over, digits in SHOWN]
            print(f"| {title} | {name} | {' | '.join(cells)} |")
            title = ""  # once a case
            written.append({"case": asdict(case), "placement": name, "figures": figures})
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    print(machine)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": written}, indent=1))


def placements(case: Case) -> list[tuple[str, libra.PoolConfig]]:
    """The rows of a case."""
    base = libra.PoolConfig(pool_size=case.pool_size, block_size=case.block_size)
    return [
        ("paper, H 4", base.replace(placement="paper", head_shards=4)),
        ("paper, H 1", base.replace(placement="paper")),
        ("surplus, all near", base.replace(ranks_per_node=2**30)),
        ("surplus", base),
    ]


def pool_figures(plan: PoolPlan, seconds: float) -> dict[str, float]:
    """Figures of one pool; none over a bound of 0 bytes."""
    moved = plan.traffic.sum(axis=0)
    node = np.arange(plan.workers) // 8
    own, bound = int(plan.geometry.rows.max()) * plan.heads.token_bytes, traffic_bound(plan)
    return {
        "imbalance": plan.imbalance,
        "gigabytes": moved.sum() / 1e9,
        "between_nodes": moved[node[:, None] != node].sum() / 1e9,
        **({"over_bound": moved.sum() / bound} if bound else {}),
        "sent": moved.sum(axis=1).max() / own,
        "received": moved.sum(axis=0).max() / own,
        "milliseconds": 1e3 * seconds,
    }


def pack(lengths: NDArray[np.uint32], case: Case) -> Packs:
    """The corpus in packs of L tokens."""
    if case.corpus == "code":
        return libra.pack_sequential(lengths, case.tokens, longer="drop")
    buffer = round(case.global_batch * case.tokens / lengths.mean())  # a window's worth of tokens
    return libra.pack_best_fit(cut_to(lengths, case.tokens), case.tokens, buffer=buffer)


def windows(packs: Packs, case: Case) -> list[list[list[int]]]:
    """The packs of each pool of each window, as the sampler assigns them."""
    batch, placed = case.global_batch, []
    for start in range(0, len(packs) - batch + 1, batch):
        window = packs.workloads[start : start + batch]
        pools = make_pools(window, case.pool_size, 1, order="index")
        placed.append((start + pools).tolist())
    return placed


def plan_once(
    packs: Packs, pool: list[int], case: Case, config: libra.PoolConfig
) -> tuple[PoolPlan, float]:
    """One plan, and the seconds from its lengths to its buffer."""
    bounds = [packs.cu_seqlens(i) for i in pool]
    begun = time.perf_counter()
    plan = plan_pool(
        bounds, cp_size=case.cp_size, config=config, heads=case.heads, tokens=case.tokens
    )
    plan.to_buffer()
    return plan, time.perf_counter() - begun


if __name__ == "__main__":
    main(tyro.cli(Args))
