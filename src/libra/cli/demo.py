"""`libra demo`: train a small model twice on this machine's CPU, without and with Libra; compare.

The training itself is examples/train.py under torchrun; this file starts it, shows its progress and
writes the result.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from libra.cli.demo_summary import print_summary, summarise
from libra.extras import check_installed

_HEADS = 4  # of the demo's decoder: head pieces for a CP group come out of these
_LEAST_TOKENS = 64
_STOP_SECONDS = 10
_LINES_OF_LOG = 12
_RANK_ERROR = re.compile(r"\[rank\d+\]: (?!Traceback)\S")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """How large the demo is."""

    ranks: int = 2
    """Processes to start, one CPU rank each."""

    cp: int = 1
    """Context-parallel size: ranks that share one pack.  Must divide the ranks."""

    steps: int = 10
    """Training steps, taken once by the baseline and once by Libra."""

    tokens: int = 8192
    """Tokens of a pack; every replica trains on one pack a step."""

    out: Path = Path("out/demo")
    """Folder for summary.json and train.log."""


def check_demo(config: DemoConfig) -> None:
    """ValueError for sizes that cannot be trained.

    Not done when the configuration is made: errors raised while tyro parses reach the user wrapped
    in its own words.
    """
    for name in ("ranks", "cp", "steps"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} is {getattr(config, name)}; it must be >= 1")
    if config.ranks % config.cp:
        raise ValueError(
            f"--cp {config.cp} does not divide --ranks {config.ranks}; ranks = replicas x cp"
        )
    if _HEADS % config.cp:
        raise ValueError(
            f"--cp {config.cp} does not divide the decoder's {_HEADS} heads, "
            "as the Ulysses baseline needs"
        )
    if config.tokens < _LEAST_TOKENS:
        raise ValueError(
            f"--tokens is {config.tokens}; a pack needs at least {_LEAST_TOKENS} tokens"
        )
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"--out {config.out} is a file; name a folder")


def run_demo(config: DemoConfig, console: Console | None = None) -> int:
    """Train, print the comparison, write `summary.json`; the exit code, 1 if training failed.

    Raises ValueError for sizes that cannot be trained, before anything is started or written.
    """
    check_demo(config)
    check_installed("torch", "libra demo")
    console = Console() if console is None else console
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {config.out} cannot be made: {error.strerror}") from error
    log = config.out / "train.log"
    started = time.perf_counter()
    console.print(
        f"Training on {config.ranks} CPU ranks (CP {config.cp}): {config.steps} steps, "
        f"packs of {config.tokens:,} tokens.\n"
        "Each step first with the baseline: each CP group computes its own pack.  "
        "Then Libra: all replicas share one pool.\n"
        "Both take the same packs in the same order, from the same weights."
    )
    events, code = _train(config, log, console)
    if code:
        console.print(_reasons(log), markup=False, highlight=False)
        console.print(f"[red]Training ended with exit code {code}[/]; the whole log is in {log}")
        return 1
    summary = summarise(events)
    summary["total_seconds"] = time.perf_counter() - started
    path = config.out / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print_summary(summary, console)
    console.print(f"{summary['total_seconds']:.0f} s in all.  Figures are in {path}")
    return 0


def training_script() -> Path:
    """Where examples/train.py is: inside an installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parent
    places = [
        package.parent / "examples" / "train.py",
        package.parents[2] / "examples" / "train.py",
    ]
    for place in places:
        if place.is_file():
            return place
    raise ValueError(f"examples/train.py is missing; looked at {' and '.join(map(str, places))}")


def training_command(config: DemoConfig) -> list[str]:
    """torchrun, by its module name: no script of it need be on the path."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.ranks), str(training_script())]
    for name in ("cp", "steps", "tokens"):
        command += [f"--{name}", str(getattr(config, name))]
    return command


def _train(config: DemoConfig, log: Path, console: Console) -> tuple[list[dict[str, Any]], int]:
    """Run the training and follow its steps; its events and its exit code."""
    events: list[dict[str, Any]] = []
    bar = Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    environment = _threads(config.ranks)
    with (
        log.open("w") as errors,
        _child(training_command(config), errors, environment) as child,
        bar,
    ):
        task = bar.add_task("starting ranks", total=2 * config.steps)
        assert child.stdout is not None
        for line in child.stdout:
            event = _parse(line)
            if event is None:
                errors.write(line)
                continue
            events.append(event)
            if event["event"] == "step":
                text = f"{event['scheme']:<8} loss {event['loss']:.4f}"
                bar.update(task, advance=1, description=text)
        code = child.wait()
    return events, code


@contextmanager
def _child(command: list[str], errors: Any, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone when the block ends, however it ends."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _leave) if in_main else None
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    try:
        yield child
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
        if child.poll() is None:
            child.terminate()  # torchrun passes it on to the ranks
            try:
                child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _leave(number: int, frame: object) -> None:
    """Turn a signal that would end this process at once into an exit that cleans up."""
    raise SystemExit(128 + number)


def _threads(ranks: int) -> dict[str, str]:
    """The environment of the ranks: an even share of the cores each, unless the user chose."""
    share = max(1, (os.cpu_count() or 1) // ranks)
    return {"OMP_NUM_THREADS": str(share), **os.environ}


def _reasons(log: Path) -> str:
    """What the ranks' own errors say, without their tracebacks; else the end of the log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if _RANK_ERROR.match(line)]
    return "\n".join((errors or lines)[-_LINES_OF_LOG:])


def _parse(line: str) -> dict[str, Any] | None:
    """The event on a line of output, or None for any other text."""
    if not line.startswith('{"event"'):
        return None
    event: dict[str, Any] = json.loads(line)
    return event
