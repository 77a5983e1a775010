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

COMMANDS: Final[dict[str, tuple[type, Callable[[Any], int]]]] = {
    "demo": (DemoConfig, run_demo),
    "plan": (PlanOptions, run_plan),
    "simulate": (SimulateOptions, run_simulate),
    "calibrate": (CalibrateOptions, run_calibrate),
    "bench": (BenchOptions, run_bench),
}
"""Each command's options, whose docstring describes the command, and the function that runs."""


def parse_options(args: Sequence[str] | None = None) -> Any:
    """The options object of a subcommand.  Unusable words end the process with code 2."""
    kinds: Any = Union[  # noqa: UP007 (of a tuple that is made here)
        tuple(
            Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)]
            for name, (kind, _) in COMMANDS.items()
        )
    ]
    about = "Every GPU equally busy in the attention of long-context training."
    return tyro.cli(kinds, prog="libra", description=about, args=args)


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code, or 2 after one line on stderr for unusable input."""
    options = parse_options(args)
    run = next(run for kind, run in COMMANDS.values() if kind is type(options))
    try:
        return run(options)
    except ValueError as error:
        print(f"libra: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("libra: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
