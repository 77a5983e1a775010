"""`libra demo`: train a small model twice on this machine's CPU, without and with Libra; compare.

The training itself is examples/train.py under torchrun.  This file starts it, shows its progress
and writes the result.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from libra.cli.demo_summary import print_summary, summarise
from libra.config import check_count
from libra.extras import check_installed

_HEADS = 4
"""Query heads of the demo's decoder, which a CP group shares."""
_LEAST = {"ranks": 1, "cp": 1, "steps": 1, "tokens": 64}
_STOP_SECONDS = 10
_LINES_OF_LOG = 12
_RANK_ERROR = re.compile(r"\[rank\d+\]: (?!Traceback)\S")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Train a small model on this machine's CPU, without and with Libra, and compare both."""

    ranks: int = 2
    """Processes to start, each a rank on the CPU."""

    cp: int = 1
    """Context-parallel size: ranks that share one pack.  Must divide the ranks."""

    steps: int = 10
    """Training steps.  The baseline and Libra both take each of them."""

    tokens: int = 8192
    """Tokens of a pack.  Every replica trains on one pack a step."""

    out: Path = Path("out/demo")
    """Folder for summary.json and train.log."""


def check_demo(config: DemoConfig) -> None:
    """Raise ValueError for sizes that cannot be trained.

    The dataclass does not check itself, because tyro words errors that are raised while it parses
    in its own way.
    """
    for name, least in _LEAST.items():
        check_count(f"--{name}", getattr(config, name), least=least)
    if config.ranks % config.cp:
        raise ValueError(
            f"--cp {config.cp} does not divide --ranks {config.ranks}; ranks = replicas x cp"
        )
    if _HEADS % config.cp:
        raise ValueError(
            f"--cp {config.cp} does not divide the decoder's {_HEADS} heads, "
            "as the Ulysses baseline needs"
        )


def run_demo(config: DemoConfig, console: Console | None = None) -> int:
    """Train, print the comparison, write `summary.json`; the exit code, 1 if training failed.

    Raises ValueError for sizes that cannot be trained, before anything is started or written.
    """
    check_demo(config)
    check_installed("torch", "the demo")
    console = Console() if console is None else console
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"--out {config.out} cannot be made ({error.strerror}); name a folder"
        raise ValueError(text) from error
    log = config.out / "train.log"
    started = time.perf_counter()
    console.print(
        f"Training on {config.ranks} CPU ranks (CP {config.cp}): {config.steps} steps, "
        f"packs of {config.tokens:,} tokens.\n"
        "Each step runs twice: with the baseline, where each CP group computes its own pack, "
        "then with Libra, where all replicas share one pool.\n"
        "Both train on the same packs in the same order, from the same weights."
    )
    events, code = _train(config, log, console)
    if code:
        console.print(_rank_errors(log), markup=False, highlight=False)
        console.print(f"[red]Training ended with exit code {code}[/]; the whole log is in {log}")
        return 1
    summary = summarise(events)
    summary["total_seconds"] = time.perf_counter() - started
    path = config.out / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print_summary(summary, console)
    console.print(f"The demo took {summary['total_seconds']:.0f} s.  All figures are in {path}")
    return 0


def training_script() -> Path:
    """Path of examples/train.py, inside an installed package or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for root in (package, package.parents[1]):
        if (script := root / "examples" / "train.py").is_file():
            return script
    raise ValueError(f"examples/train.py is neither in {package} nor in {package.parents[1]}")


def training_command(config: DemoConfig) -> list[str]:
    """Command line of the training.  torchrun is started as a module: it may not be on the path."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.ranks), str(training_script())]
    for name in ("cp", "steps", "tokens"):
        command += [f"--{name}", str(getattr(config, name))]
    return command


def _train(config: DemoConfig, log: Path, console: Console) -> tuple[list[dict[str, Any]], int]:
    """Run the training and show its steps; returns its events and its exit code."""
    events: list[dict[str, Any]] = []
    columns = ("{task.description:<34}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Each rank gets an equal share of the cores, unless the user chose.
    share = max(1, (os.cpu_count() or 1) // config.ranks)
    environment = {"OMP_NUM_THREADS": str(share), **os.environ}
    with (
        log.open("w") as errors,
        _child(training_command(config), errors, environment) as child,
        Progress(*columns, console=console) as bar,
    ):
        task = bar.add_task("starting ranks", total=2 * config.steps)
        for line in child.stdout or ():
            if not line.startswith('{"event"'):
                errors.write(line)
                continue
            events.append(event := json.loads(line))
            if event["event"] == "step":
                text = f"{event['scheme']:<8} loss {event['loss']:.4f}"
                bar.update(task, advance=1, description=text)
        return events, child.wait()


@contextmanager
def _child(command: list[str], errors: Any, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has ended when the block ends, for whatever reason the block ends."""
    # SIGTERM would end this process at once: make it an exit that cleans up.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    try:
        yield child
    finally:
        signal.signal(signal.SIGTERM, before)
        child.terminate()  # if it still runs; torchrun passes the signal on to the ranks
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _rank_errors(log: Path) -> str:
    """The error lines of the ranks without their tracebacks; without any, the log's end."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if _RANK_ERROR.match(line)]
    return "\n".join((errors or lines)[-_LINES_OF_LOG:])
