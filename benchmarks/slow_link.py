"""Does transfer hide behind compute where the link is really slow?

    python benchmarks/slow_link.py --json slow-link.json      # needs root and iproute2

Ranks run in network namespaces joined by rate-limited virtual Ethernet.  One pool has one heavy
pack (a single sample) and otherwise light ones (short samples), so most of what is moved is moved
from rank 0 to the others and back.  For every rate and every M, forward and backward are timed, and
so are the same kernels without transfers and the same messages without kernels.  Rates are chosen
so that all transfers, one after the other, take a given share of compute.

Without root, or where no such link can be made, it says why and exits 0.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.slow import network
from benchmarks.slow.events import Exposure, RankEvents, exposure, from_plain, middle_seconds

INSIDE = "LIBRA_SLOW_LINK_INSIDE"
MARK = "@libra "
PORT = 29_400


@dataclass(frozen=True, kw_only=True)
class Args:
    """What to measure."""

    ranks: int = 2
    """2 to 4; rank 0 holds the heavy pack."""
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    """Values of M; 1 is no overlap."""
    shares: tuple[float, ...] = (0.25, 0.5, 1.0)
    """Transfer over compute of the forward pass at M = 4; each gives a rate."""
    rates: tuple[float, ...] = ()
    """Mbit/s, instead of `shares`."""
    repeats: int = 5
    tokens: int = 4096
    """Of every pack."""
    light_sample: int = 128
    """Tokens of every sample of the light packs."""
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    burst_kb: int = 256
    """Size of the token bucket.  Below 64 KiB the kernel cuts what it sends into single packets."""
    nice: int = 0
    """Niceness of the threads that compute; above 0, gloo's threads go first."""
    limit: float = 900.0
    """Seconds after which everything is ended."""
    json: Path | None = None
    """Write the figures there too."""

    def __post_init__(self) -> None:
        """ValueError for settings that cannot be run."""
        if not 2 <= self.ranks <= 4:
            raise ValueError(f"--ranks is {self.ranks}; choose 2 to 4")
        if not self.chunks or min(self.chunks) < 1 or self.heads % max(self.chunks):
            raise ValueError(f"--chunks {self.chunks} must divide --heads {self.heads}")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads is {self.kv_heads}; it must divide --heads {self.heads}")
        if any(value <= 0 for value in (*self.shares, *self.rates)):
            raise ValueError(f"--shares {self.shares} and --rates {self.rates} must be > 0")
        if self.repeats < 1 or self.light_sample < 1 or self.tokens < self.light_sample:
            raise ValueError("--repeats, --light-sample must be >= 1 and --tokens no shorter")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"--nice is {self.nice}; choose 0 to 19")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One pass at one rate and M; seconds unless it says otherwise."""

    rate: float | None
    """Mbit/s each way; None is no limit."""
    chunks: int
    way: str
    compute: float
    """The kernels alone, on the slowest rank, all ranks computing."""
    transfer: float
    """All messages alone, dispatch then return, one after the other."""
    middle_transfer: float
    exposure: Exposure
    """The pass itself, kernels next to transfers."""
    sent: int
    """Bytes dispatched and returned by all ranks together."""
    main_delay: float
    """Seconds that the busiest computing thread was ready and had no CPU."""
    other_cpu: float
    """CPU seconds of all other threads of all ranks (gloo's)."""
    other_delay: float
    """Seconds that they were ready and had no CPU."""
    load: float
    """Machine's load average when it was measured."""

    @property
    def hidden(self) -> float | None:
        """Share of the middle transfers that nobody waited for; None where there is no middle."""
        return 1 - self.exposure.middle / self.middle_transfer if self.middle_transfer else None


@dataclass(slots=True)
class Ranks:
    """Rank processes inside the network."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, args: Args) -> None:
        """Start every rank; they join their group at the first order."""
        device_plan = Path(__file__).parent / "slow" / "rank.py"
        shapes = ("tokens", "light_sample", "heads", "kv_heads", "head_dim")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"}
        for rank in range(args.ranks):
            command = [sys.executable, str(device_plan), "--rank", str(rank)]
            command += ["--world", str(args.ranks), "--store", f"{network.address(0)}:{PORT}"]
            for name in shapes:
                command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
            self.processes.append(
                subprocess.Popen(
                    network.inside(rank, command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Give all ranks one order; their answers, by rank.  RuntimeError if a rank ended."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return [self._answer(rank, process) for rank, process in enumerate(self.processes)]

    def _answer(self, rank: int, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        raise RuntimeError(f"rank {rank} ended with code {process.wait()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run outside: check, then run this device_plan again inside namespaces of its own."""
    args = tyro.cli(Args, args=arguments)
    if os.environ.get(INSIDE):
        measure(args)
        return 0
    reason = network.missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    command = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]
    child = subprocess.Popen(
        network.isolated(command),
        env={**os.environ, INSIDE: "1"},
        preexec_fn=network.dies_with_parent(),
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return child.wait(args.limit)
    except subprocess.TimeoutExpired:
        print(f"ended after --limit {args.limit:g} s", file=sys.stderr)
        return 124
    except KeyboardInterrupt:
        return 130
    finally:
        child.kill()  # the kernel ends everything inside with it
        child.wait()


def measure(args: Args) -> None:
    """Run inside: make the network and the ranks, measure and report."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    network.make_network(args.ranks)
    ranks = Ranks()
    ranks.start(args)
    for chunks in args.chunks:
        ranks.ask(do="connect", chunks=chunks)
    if args.nice:
        ranks.ask(do="yield", nice=args.nice)
    free = run_pass(ranks, args, None, 4 if 4 in args.chunks else max(args.chunks), repeats=3)
    rates = args.rates or tuple(
        8e-6 * free[0].sent / (share * free[0].compute) for share in args.shares
    )
    every = list(free)
    for rate in sorted(rates, reverse=True):
        network.shape(args.ranks, rate, args.burst_kb)
        for chunks in args.chunks:
            print(f"{rate:.0f} Mbit/s, M {chunks} ...", file=sys.stderr, flush=True)
            every += run_pass(ranks, args, rate, chunks, args.repeats)
            if args.json is not None:  # each time: what is measured is kept if it is broken off
                args.json.write_text(json.dumps(as_plain(every, args), indent=2) + "\n")
    report(every, args, console)


def run_pass(
    ranks: Ranks, args: Args, rate: float | None, chunks: int, repeats: int
) -> list[Figures]:
    """Forward and backward at one rate and M."""
    load = os.getloadavg()[0]
    answers = ranks.ask(do="measure", chunks=chunks, repeats=repeats)
    return [
        summarise(
            [[from_plain(turn) for turn in answer[way]["events"]] for answer in answers],
            [answer[way]["compute"] for answer in answers],
            [answer[way]["alone"] for answer in answers],
            rate=rate,
            chunks=chunks,
            way=way,
            load=load,
        )
        for way in ("forward", "backward")
    ]


def summarise(
    events: Sequence[Sequence[RankEvents]],
    compute: Sequence[Sequence[float]],
    alone: Sequence[Sequence[dict[str, float]]],
    *,
    rate: float | None,
    chunks: int,
    way: str,
    load: float,
) -> Figures:
    """Figures of the faster half of the repeats, since other programs may share the machine: of the
    pass whose step is their median, and medians of what was measured alone.

    Every argument is by rank, then by repeat.
    """
    turns = [list(turn) for turn in zip(*events, strict=True)]
    # A message has arrived when the last rank has it.
    seconds = [
        {int(post): max(rank[post] for rank in turn) for post in turn[0]}
        for turn in zip(*alone, strict=True)
    ]
    half = (len(turns) + 1) // 2
    turn = sorted(turns, key=lambda turn: exposure(turn, chunks).step)[(half - 1) // 2]
    seconds = sorted(seconds, key=lambda each: sum(each.values()))[:half]
    median = statistics.median
    return Figures(
        rate=rate,
        chunks=chunks,
        way=way,
        compute=median(sorted(max(turn) for turn in zip(*compute, strict=True))[:half]),
        transfer=median([sum(each.values()) for each in seconds]),
        middle_transfer=median([middle_seconds(each, turn, chunks) for each in seconds]),
        exposure=exposure(turn, chunks),
        sent=sum(post.sent for rank in turn for post in rank.posts),
        main_delay=max(rank.main_delay for rank in turn),
        other_cpu=sum(rank.other_cpu for rank in turn),
        other_delay=sum(rank.other_delay for rank in turn),
        load=load,
    )


def report(every: Sequence[Figures], args: Args, console: Console) -> None:
    """Print a table for each direction."""
    parts = ("first", "middle", "last", "uneven", "rest")
    shown = ("compute", "transfer", "step", "attended", *parts)
    for way in ("forward", "backward"):
        table = Table(title=f"{way}, {args.ranks} ranks, {args.tokens} tokens a pack, milliseconds")
        times = ("compute", "transfer", "step", "kernels", *parts)
        for column in ("Mbit/s", "M", *times, "middle hidden", "gloo CPU"):
            table.add_column(column, justify="right")
        for row in every:
            if row.way != way:
                continue
            values = plain_figures(row)
            table.add_row(
                "no limit" if row.rate is None else f"{row.rate:.0f}",
                str(row.chunks),
                *(f"{1e3 * values[name]:.0f}" for name in shown),
                "" if row.hidden is None else f"{row.hidden:.0%}",
                f"{1e3 * row.other_cpu:.0f}",
            )
        console.print(table)


def plain_figures(row: Figures) -> dict[str, Any]:
    """One pass's figures by name, the parts of its exposure among them."""
    values = dataclasses.asdict(row)
    return {**values.pop("exposure"), **values, "rest": row.exposure.rest, "hidden": row.hidden}


def as_plain(every: Sequence[Figures], args: Args) -> dict[str, Any]:
    """The figures as JSON takes them."""
    settings = dataclasses.asdict(args)
    settings["json"] = None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "settings": settings,
        "figures": [plain_figures(row) for row in every],
    }


if __name__ == "__main__":
    sys.exit(main())
