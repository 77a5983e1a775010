"""The `libra` command: tyro parses the options of a subcommand, then its function runs.

Functions run after parsing, so that this file reports their errors.  Importing it loads no PyTorch:
only commands that train or measure do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Union

import tyro

from libra.bench.options import BenchOptions
from libra.cli.bench import run_bench
from libra.cli.calibrate import CalibrateOptions, run_calibrate
from libra.cli.demo import DemoConfig, run_demo
from libra.cli.plan import PlanOptions, run_plan
from libra.cli.simulate import SimulateOptions, run_simulate

USAGE_ERROR = 2
INTERRUPTED = 130
"""Exit code that a shell reports for a program which Ctrl-C ended."""

COMMANDS: Final[dict[type, Callable[[Any], int]]] = {
    DemoConfig: run_demo,
    PlanOptions: run_plan,
    SimulateOptions: run_simulate,
    CalibrateOptions: run_calibrate,
    BenchOptions: run_bench,
}
"""The function that runs with each kind of options."""

DESCRIPTIONS: Final = {
    "demo": "Train a small model on this machine's CPU, without and with Libra, and compare both.",
    "plan": "Plan one pool of a corpus on this machine's CPU; show who computes and sends what.",
    "simulate": "Replay a corpus on a model of a cluster; recommend a configuration.",
    "calibrate": "Measure this machine's attention kernel; write the table for the simulator.",
    "bench": "Measure Libra and its baselines in turn, under torchrun, on CPUs or GPUs.",
}
"""Name and --help text of each command, in the order of `COMMANDS`."""


def parse_options(args: Sequence[str] | None = None) -> Any:
    """The options object of a subcommand.  Unusable words end the process with code 2."""
    kinds: Any = Union[  # noqa: UP007 (of a tuple that is made here)
        tuple(
            Annotated[kind, tyro.conf.subcommand(name, description=text, prefix_name=False)]
            for kind, (name, text) in zip(COMMANDS, DESCRIPTIONS.items(), strict=True)
        )
    ]
    about = "Every GPU equally busy in the attention of long-context training."
    return tyro.cli(kinds, prog="libra", description=about, args=args)


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code, or 2 after one line on stderr for unusable input."""
    options = parse_options(args)
    try:
        return COMMANDS[type(options)](options)
    except ValueError as error:
        print(f"libra: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("libra: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
