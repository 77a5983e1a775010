"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


def table_console(columns: int) -> Console:
    """The terminal as wide as it is; a pipe or file, which says no width, at least `columns`."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, columns)
    return console
