"""Where commands print tables and write files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console


def table_console(columns: int) -> Console:
    """The terminal as wide as it is; a pipe or file, which says no width, at least `columns`."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, columns)
    return console


def check_outputs(
    files: Mapping[str, Path | None],
    *,
    corpus: str | Path | None = None,
    make_folders: bool = False,
) -> None:
    """ValueError for a file that cannot be written, before any work is done for it.

    `files` are named by their options; None is not written.  All must differ from each other and
    from the `corpus`, and lie in a folder there is, unless `make_folders`.
    """
    taken = {} if corpus is None else {Path(corpus).resolve(): "the corpus"}
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{option} {path} is a folder; name a file")
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise ValueError(f"{option} {path} and {other} must be different files")
        if not make_folders and not path.absolute().parent.is_dir():
            raise ValueError(
                f"{option} {path} cannot be written: the folder {path.parent} does not exist"
            )
        # Of a file that is still to be made, the nearest folder that exists decides.
        place = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not os.access(place, os.W_OK):
            raise ValueError(f"{option} {path} cannot be written: no permission")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Makes the folder of `path`; an OSError inside becomes a ValueError that names both."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror or error}") from error
