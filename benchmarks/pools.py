"""How alike the pools of a window are: sampler order, Karmarkar-Karp, VRSP, and VRSP refined.

    python benchmarks/pools.py --lengths tests/data/lengths-code.npy --json pools.json

Every method groups the packs of the same windows into pools of exactly P packs.  Figures are means
over the windows, times medians over windows and repetitions, warm and on one thread.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

import libra
from benchmarks.karmarkar_karp import equal_partitions
from libra.data.pools import contiguous_pools, distance_to_bound, imbalance, pool_loads

IntArray = NDArray[np.int64]
Method = Callable[[IntArray, "Case"], IntArray]


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to measure."""

    lengths: Path
    """Sample lengths in tokens, .npy; samples longer than a pack are dropped."""
    sigma: float = 0.8
    """Spread of the lognormal pack workloads."""
    lognormal_windows: int = 40
    """Windows of lognormal packs, seeds 0, 1, ..."""
    repeats: int = 5
    """Times each window is placed."""
    json: Path | None = None
    """Write the figures there too."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of training run."""

    tokens: int | None
    """L of packs of real lengths; None for lognormal workloads."""
    global_batch: int
    pool_size: int
    dp_size: int

    @property
    def title(self) -> str:
        corpus = "lognormal" if self.tokens is None else f"code, {self.tokens // 1024}K"
        pools = self.global_batch // self.pool_size
        return f"{corpus}: {self.global_batch} packs, {pools} pools of {self.pool_size}"


CASES = (
    Case(tokens=32 * 1024, global_batch=128, pool_size=4, dp_size=32),
    Case(tokens=32 * 1024, global_batch=128, pool_size=8, dp_size=32),
    Case(tokens=256 * 1024, global_batch=128, pool_size=8, dp_size=32),
    Case(tokens=256 * 1024, global_batch=128, pool_size=16, dp_size=32),
    Case(tokens=1024 * 1024, global_batch=64, pool_size=8, dp_size=32),
    Case(tokens=1024 * 1024, global_batch=64, pool_size=16, dp_size=32),
    Case(tokens=None, global_batch=128, pool_size=8, dp_size=32),
    Case(tokens=None, global_batch=1024, pool_size=8, dp_size=256),
    Case(tokens=None, global_batch=1024, pool_size=64, dp_size=256),
)


def refined(workloads: IntArray, case: Case) -> IntArray:
    """What the sampler emits by default."""
    pools = libra.refine_pools(workloads, libra.place_packs(workloads, case.pool_size))
    return libra.order_pools(workloads, pools, case.dp_size // case.pool_size, "grouped")


METHODS: dict[str, Method] = {
    "sampler order": lambda w, case: contiguous_pools(len(w), case.pool_size),
    "Karmarkar-Karp": lambda w, case: equal_partitions(w, len(w) // case.pool_size),
    "VRSP": lambda w, case: libra.place_packs(w, case.pool_size),
    "VRSP, refined, grouped": refined,
}


@dataclass(frozen=True)
class Figures:
    """One method on one case."""

    case: str
    method: str
    windows: int
    imbalance: float
    """max / mean - 1 of the pools' loads."""
    slowest: float
    """Sum over GA indices of the slowest pool, over that of equal pools, - 1."""
    slowest_grouped: float
    """The same with the method's pools sorted by load."""
    distance: float
    """Heaviest pool over the lower bound, - 1."""
    milliseconds: float


def main(args: Args) -> None:
    """Measure, print, write."""
    load_before = os.getloadavg()
    lengths = np.load(args.lengths, allow_pickle=False)
    found: list[Figures] = []
    for case in CASES:
        windows = list(windows_of(case, lengths, args))
        found += [measure(case, name, windows, args.repeats) for name in METHODS]
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "load_average_before": load_before[0],
        "load_average_after": os.getloadavg()[0],
    }
    print_table(found)
    if args.json is not None:
        figures = [asdict(each) for each in found]
        args.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n")


def windows_of(case: Case, lengths: NDArray[Any], args: Args) -> Iterator[IntArray]:
    """Workloads of each window's packs, int64 [GBS]."""
    if case.tokens is None:
        for seed in range(args.lognormal_windows):
            draws = np.random.default_rng(seed).lognormal(0.0, args.sigma, case.global_batch)
            yield (draws * 1e9).astype(np.int64)
        return
    packs = libra.pack_sequential(lengths, case.tokens, longer="drop").workloads
    whole = len(packs) // case.global_batch
    yield from packs[: whole * case.global_batch].reshape(whole, case.global_batch)


def measure(case: Case, name: str, windows: list[IntArray], repeats: int) -> Figures:
    """Place every window `repeats` times with one method."""
    method, pools_per_index = METHODS[name], case.dp_size // case.pool_size
    method(windows[0], case)  # compiled code is loaded here
    rows, times = [], []
    for workloads in windows:
        for _ in range(repeats):
            begin = time.perf_counter()
            pools = method(workloads, case)
            times.append(time.perf_counter() - begin)
        loads = pool_loads(workloads, pools)
        rows.append(
            (
                imbalance(loads),
                excess(loads, pools_per_index),
                excess(np.sort(loads), pools_per_index),
                distance_to_bound(workloads, pools),
            )
        )
    means = np.mean(rows, axis=0).tolist()
    return Figures(case.title, name, len(windows), *means, statistics.median(times) * 1e3)


def excess(loads: NDArray[Any], pools_per_index: int) -> float:
    """How much longer the slowest pools of all indices take than equal pools would, as a share."""
    slowest = loads.reshape(-1, pools_per_index).max(axis=1)
    return float(slowest.sum() / (loads.mean() * len(slowest)) - 1.0)


def print_table(found: list[Figures]) -> None:
    """One block of rows a case."""
    table = Table(title="Pools of a window, means over windows; 0 is best in all but the time")
    table.add_column("case")
    table.add_column("method")
    for column in ("imbalance", "slowest pools", "if grouped", "above bound", "ms"):
        table.add_column(column, justify="right")
    for i, each in enumerate(found):
        first = i == 0 or found[i - 1].case != each.case
        if first and i:
            table.add_section()
        table.add_row(
            f"{each.case} ({each.windows} windows)" if first else "",
            each.method,
            f"{each.imbalance:.3%}",
            f"{each.slowest:.3%}",
            f"{each.slowest_grouped:.3%}",
            f"{each.distance:.3%}",
            f"{each.milliseconds:.2f}",
        )
    Console(width=140 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
