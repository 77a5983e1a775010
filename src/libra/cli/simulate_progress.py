"""Progress of a study on a terminal: one bar a stage, with the time that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from libra.simulate.compare import Progress as ShowProgress


@contextmanager
def stage_progress(console: Console) -> Iterator[ShowProgress]:
    """Bars on stderr, as wide as `console`; gone at the end."""
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, width=console.width),
        transient=True,
    )
    with bars:
        yield partial(_show, bars)


def _show(bars: Progress, stage: str, done: int, total: int | None) -> None:
    """Move the bar of a stage, which appears with its first call."""
    task = next((task.id for task in bars.tasks if task.description == stage), None)
    if task is None:
        task = bars.add_task(stage)
    bars.update(task, completed=done, total=total)
