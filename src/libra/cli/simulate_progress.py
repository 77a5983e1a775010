"""Progress of a study on a terminal: one bar a stage, with the time that is left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StageProgress:
    """Called with the stage, what is done of it and how much there is; draws on stderr."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, width=console.width),
            transient=True,
        )
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> StageProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._stages[stage], completed=done, total=total)
