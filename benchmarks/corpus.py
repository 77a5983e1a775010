"""How reading, packing and placing grow with the corpus: seconds and peak memory.

    python benchmarks/corpus.py --samples 1e6 1e7 1e8 --json corpus.json

Lognormal lengths are made in chunks, packed and placed window by window (VRSP, then swaps), and
never held together.  Each size runs in a process of its own, on one thread, for its peak memory.
Seconds are of CPU time and leave out making the lengths, which is reported next to them.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from libra.data.pools import imbalance, place_packs, pool_loads, refine_pools
from libra.simulate.windows import WindowReader

IntArray = NDArray[np.int64]
CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to measure."""

    samples: tuple[float, ...] = (1e6, 1e7, 1e8)
    """Sizes of the corpora."""
    packing: tuple[Literal["sequential", "best-fit"], ...] = ("sequential", "best-fit")
    """How samples are packed."""
    tokens: int = 262_144
    """L: tokens of a pack."""
    global_batch: int = 128
    """Packs of a window."""
    pool_size: int = 8
    """Packs of a pool."""
    median: float = 644.0
    """Median tokens of a sample."""
    sigma: float = 1.4
    """Spread of the logarithm of a sample's tokens."""
    json: Path | None = None
    """Write the figures there too."""
    one: bool = False
    """Measure the first size and packing in this process and print JSON."""


def measure(args: Args, samples: int, packing: Literal["sequential", "best-fit"]) -> dict[str, Any]:
    """Figures of one corpus."""
    consume(args, lengths(args, 200_000, []), packing)  # compile and import
    idle = peak_bytes()
    making: list[float] = []
    begin = time.process_time()
    figures = consume(args, lengths(args, samples, making), packing)
    seconds = time.process_time() - begin - sum(making)
    return {
        "samples": samples,
        "packing": packing,
        "seconds": seconds,
        "seconds_making": sum(making),
        "idle_peak_bytes": idle,
        "peak_bytes": peak_bytes(),
        **figures,
    }


def consume(
    args: Args, chunks: Iterator[IntArray], packing: Literal["sequential", "best-fit"]
) -> dict[str, Any]:
    """Pack all chunks and place every window."""
    reader = WindowReader(
        chunks, tokens=args.tokens, packs=args.global_batch, packing=packing, longer="drop"
    )
    placing, sums = 0.0, np.zeros(2)
    for window in reader:
        begin = time.process_time()
        workloads = window.workloads
        placed = place_packs(workloads, args.pool_size)
        refined = refine_pools(workloads, placed)
        placing += time.process_time() - begin
        sums += [imbalance(pool_loads(workloads, pools)) for pools in (placed, refined)]
    counts = reader.summary
    return {
        "windows": counts.windows,
        "tokens": counts.tokens,
        "dropped_samples": counts.dropped_samples,
        "padding_tokens": counts.padding_tokens,
        "median": counts.median,
        "seconds_placing": placing,
        "imbalance_vrsp": sums[0] / counts.windows,
        "imbalance_refined": sums[1] / counts.windows,
    }


def lengths(args: Args, samples: int, making: list[float]) -> Iterator[IntArray]:
    """Lognormal lengths in chunks; the seconds of each chunk are appended to `making`."""
    rng = np.random.default_rng(0)
    for first in range(0, samples, CHUNK):
        begin = time.process_time()
        drawn = rng.lognormal(np.log(args.median), args.sigma, min(CHUNK, samples - first))
        chunk = np.maximum(np.rint(drawn), 1).astype(np.int64)
        making.append(time.process_time() - begin)
        yield chunk


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_apart(args: Args, samples: int, packing: str) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--one", "--samples", str(samples), "--packing", packing]
    for name in ("tokens", "global_batch", "pool_size", "median", "sigma"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env={**os.environ, **one_thread}, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(found: list[dict[str, Any]], args: Args) -> None:
    title = (
        f"L = {args.tokens:,}, GBS {args.global_batch}, P = {args.pool_size}; "
        f"lognormal lengths, median {args.median:g}, sigma {args.sigma:g}"
    )
    table = Table(title=title)
    for column in ("samples", "packing", "windows", "s", "of it placing", "µs a sample"):
        table.add_column(column, justify="left" if column == "packing" else "right")
    for column in ("peak MB", "growth MB", "imbalance VRSP", "refined"):
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(
            f"{row['samples']:,}",
            row["packing"],
            f"{row['windows']:,}",
            f"{row['seconds']:.2f}",
            f"{row['seconds_placing']:.2f}",
            f"{row['seconds'] / row['samples'] * 1e6:.3f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{(row['peak_bytes'] - row['idle_peak_bytes']) / 1e6:.0f}",
            f"{row['imbalance_vrsp']:.4f}",
            f"{row['imbalance_refined']:.4f}",
        )
    Console(width=120).print(table)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.one:
        print(json.dumps(measure(args, int(args.samples[0]), args.packing[0])))
        return
    found = [
        measure_apart(args, int(samples), packing)
        for packing in args.packing
        for samples in args.samples
    ]
    show(found, args)
    if args.json is not None:
        machine = {"python": platform.python_version(), "numpy": np.__version__}
        args.json.write_text(json.dumps({"machine": machine, "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
