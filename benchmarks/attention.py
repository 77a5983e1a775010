"""The CPU set of `libra bench attention`: what `make bench` runs, in under ten minutes.

    python benchmarks/attention.py

Every set is one torchrun; figures are ratios inside it.  Writes benchmarks/results/DATE-cpu.json
and the tables of docs/results/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = "tests/data/lengths-code.npy"
MARK = "<!-- figures: everything below is written by benchmarks/attention.py -->"


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to run and where to write."""

    ranks: int = 2
    """Processes of each set."""
    only: tuple[str, ...] = ()
    """Names of the sets to run; all by default."""
    results: Path = ROOT / "benchmarks" / "results"
    """Folder of the JSON."""
    page: Path | None = ROOT / "docs" / "results" / "benchmarks.md"
    """Page whose tables are replaced."""


@dataclass(frozen=True, kw_only=True)
class Set:
    """One run of `libra bench attention`."""

    title: str
    words: str


SETS = {
    "4k": Set(
        title="Packs of 4K tokens, no context parallelism",
        words="--tokens 4096 --windows 2 --config.block-size 512",
    ),
    "8k": Set(
        title="Packs of 8K tokens, no context parallelism",
        words="--tokens 8192 --windows 1 --scheme ulysses wlb libra --config.block-size 512",
    ),
    "cp": Set(
        title="One replica, its packs of 4K tokens shared by a CP group",
        words="--tokens 4096 --windows 1 --cp {ranks} --scheme ulysses ring libra "
        "--config.shard-layout zigzag --config.block-size 512",
    ),
}


def main(args: Args) -> int:
    """Run the sets and write what they gave; the exit code."""
    chosen = args.only or tuple(SETS)
    found: dict[str, Any] = {}
    for name in chosen:
        if name not in SETS:
            print(f"no set {name!r}; choose from {', '.join(SETS)}", file=sys.stderr)
            return 2
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "figures.json"
            words = command(SETS[name], args.ranks)
            print(f"\n{SETS[name].title}\n{shown(words)}", flush=True)
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            run = [*words, "--json", str(path)]
            load = round(os.getloadavg()[0], 1)
            done = subprocess.run(run, cwd=ROOT, env=environment)
            if done.returncode:
                return done.returncode
            found[name] = json.loads(path.read_text())
        for output in ("json", "trace"):
            found[name]["settings"].pop(output)
        found[name] |= {"title": SETS[name].title, "command": shown(words), "load": load}
    day = next(iter(found.values()))["created"]
    args.results.mkdir(parents=True, exist_ok=True)
    results = args.results / f"{day}-cpu.json"
    results.write_text(json.dumps(found, indent=1) + "\n")
    if args.page is not None:
        before = args.page.read_text().partition(MARK)[0] if args.page.exists() else ""
        args.page.write_text(before + MARK + "\n" + "\n".join(tables(found, day)) + "\n")
    print(f"written to {results}" + ("" if args.page is None else f" and {args.page}"))
    return 0


def command(chosen: Set, ranks: int) -> list[str]:
    """The whole command line."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks), "-m", "libra.cli.main"]
    words = chosen.words.format(ranks=ranks).split()
    return [*launcher, "bench", "attention", LENGTHS, "--device", "cpu", *words]


def shown(words: list[str]) -> str:
    """The command as a user types it."""
    return " ".join(["torchrun", *words[3:]])


def folded(command: str) -> str:
    """The command in lines that fit the page; an option and its values stay together."""
    options = [option.replace(" ", "\0") for option in re.split(r" (?=--|tests/)", command)]
    lines = textwrap.wrap(" ".join(options), 88, break_on_hyphens=False)
    return " \\\n    ".join(lines).replace("\0", " ")


def tables(found: dict[str, Any], day: str) -> Iterator[str]:
    """Markdown of every set."""
    machine = next(iter(found.values()))["machine"]
    load = ", ".join(str(figures["load"]) for figures in found.values())
    yield f"\nRun on {day}: {machine}.  Load average of the machine before each set: {load}."
    for figures in found.values():
        yield f"\n## {figures['title']}\n\n```sh\n{folded(figures['command'])}\n```\n"
        yield (
            "| scheme | mean | slowest step | compute | exposed | wait "
            "| speedup | in CPU s | by loads | slowest step's speedup | MB sent |"
        )
        yield "|---" + "|---:" * 10 + "|"
        for scheme, row in figures["schemes"].items():
            ratios = row["of_ulysses"]
            times = [
                ratios[name] for name in ("straggler", "slowest", "compute", "exposed", "wait")
            ]
            speedups = ("speedup", "cpu_speedup", "predicted", "slowest_speedup")
            cells = [figures["names"][scheme], *(f"{time:.3f}" for time in times)]
            cells += [f"{ratios[name]:.2f}x" for name in speedups] + [
                f"{row['mean']['sent'] / 1e6:.1f}"
            ]
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
