"""The `libra` command.

A subcommand is a function below that takes parsed options and returns the job to run; the job runs
once parsing is over, so that its errors are reported by us.  Nothing here imports torch: only jobs
that train or measure do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import tyro
from tyro.extras import SubcommandApp

from libra.cli.bench import BenchOptions, run_bench
from libra.cli.demo import DemoConfig, run_demo
from libra.cli.plan import PlanOptions, run_plan
from libra.cli.simulate import SimulateOptions, run_simulate
from libra.simulate.calibrate import CalibrateOptions, run_calibrate

Job = Callable[[], int]
"""Does a subcommand's work and returns the exit code."""

USAGE_ERROR = 2
INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit code, or 2 with one line on stderr for unusable input."""
    app = SubcommandApp()
    app.command(demo)
    app.command(plan)
    app.command(simulate)
    app.command(calibrate)
    app.command(bench)
    job: Job = app.cli(
        prog="libra",
        description="Every GPU equally busy in the attention of long-context training.",
        args=args,
    )
    try:
        return job()
    except ValueError as error:
        print(f"libra: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("libra: interrupted", file=sys.stderr)
        return INTERRUPTED


def demo(config: tyro.conf.OmitArgPrefixes[DemoConfig]) -> Job:
    """Train a small model on this machine's CPU, plainly and with Libra, and compare."""
    return partial(run_demo, config)


def plan(options: Annotated[PlanOptions, tyro.conf.arg(name="")]) -> Job:
    """Plan one pool of a corpus on this machine's CPU; show who computes and sends what."""
    return partial(run_plan, options)


def simulate(options: Annotated[SimulateOptions, tyro.conf.arg(name="")]) -> Job:
    """Replay a corpus on a model of a cluster; recommend a configuration."""
    return partial(run_simulate, options)


def calibrate(options: Annotated[CalibrateOptions, tyro.conf.arg(name="")]) -> Job:
    """Measure this machine's attention kernel and write the table that the simulator reads."""
    return partial(run_calibrate, options)


def bench(options: Annotated[BenchOptions, tyro.conf.arg(name="")]) -> Job:
    """Measure schemes beside each other, under torchrun, on CPUs or GPUs."""
    return partial(run_bench, options)


if __name__ == "__main__":
    sys.exit(main())
