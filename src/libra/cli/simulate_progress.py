"""Progress of a study on a terminal: one bar a stage, with the time that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich import progress
from rich.console import Console

from libra.simulate.compare import Progress


@contextmanager
def stage_progress(console: Console) -> Iterator[Progress]:
    """Bars on stderr, as wide as `console`; gone at the end."""
    bars = progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description:<22}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True, width=console.width),
        transient=True,
    )
    with bars:
        yield partial(_show, bars)


def _show(bars: progress.Progress, stage: str, done: int, total: int | None) -> None:
    """Move the bar of a stage, which appears with its first call."""
    # Stages are told apart by their names.
    task = next((task.id for task in bars.tasks if task.description == stage), None)
    if task is None:
        task = bars.add_task(stage)
    bars.update(task, completed=done, total=total)
