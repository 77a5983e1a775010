"""The journal of a replay: JSON lines, the settings first, then one window of one candidate each.

Lines are only ever added.  A last line that was cut off, by a full disk or a killed run, is removed
and its window replayed again; any other damage is an error.

    {"kind": "libra replay 2", "settings": {...}}
    {"task": [window, P, B, H], "digest": "...", "figures": {...}}
    ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, Final

from libra.simulate.replay_window import WindowReplay, WindowTask

_KIND: Final = "libra replay 2"


class Journal:
    """An open journal.  Raises ValueError for another kind of file, and for other settings."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._known: dict[tuple[int, ...], tuple[str, WindowReplay]] = {}
        # Through JSON, so that tuples compare equal to the lists that are read.
        head = json.loads(json.dumps({"kind": _KIND, "settings": settings}))
        self._read(head)
        try:
            self._file = path.open("a", buffering=1, encoding="utf-8")  # flushed at a line's end
        except OSError as error:
            raise ValueError(f"cannot write the journal {path}: {error.strerror}") from error
        if self._file.tell() == 0:
            self._file.write(_line(head))

    def find(self, task: WindowTask) -> WindowReplay | None:
        """The figures of a task that was done before.  Raises ValueError for another corpus."""
        # The digest is made only of windows that the journal has.
        key = _key(task)
        if key not in self._known:
            return None
        digest, figures = self._known[key]
        if digest != task.digest():
            raise ValueError(
                f"{self._path}: window {task.window} of the journal has other packs than the "
                "corpus; remove the journal or name another"
            )
        return figures

    def add(self, task: WindowTask, figures: WindowReplay) -> None:
        """Write one window, at once, unless it was read here."""
        if (key := _key(task)) not in self._known:
            line = {"task": key, "digest": task.digest(), "figures": asdict(figures)}
            self._file.write(_line(line))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, head: Mapping[str, Any]) -> None:
        if not self._path.exists():
            return
        # Step 1: whole lines; a file that holds a part of the first one only is a journal too.
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        if not lines and not _line(head).encode().startswith(data):
            raise ValueError(f"{self._path} is no journal of a replay; name another file")
        # Step 2: the settings in the first line, a window in each other.
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                if number > 1:
                    figures = WindowReplay.from_json(entry["figures"])
                    self._known[tuple(map(int, entry["task"]))] = (entry["digest"], figures)
                    continue
                kind, settings = entry["kind"], entry["settings"]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self._path}, line {number}, is not of a replay's journal; "
                    "repair it, remove it or name another"
                ) from error
            if kind != _KIND:
                raise ValueError(f"{self._path} is a journal of {kind!r}; this is {_KIND!r}")
            _same_settings(self._path, settings, head["settings"])
        # Step 3: remove a line that was cut off, so that the next one starts a line.
        if whole < len(data):
            with self._path.open("r+b") as file:
                file.truncate(whole)


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


def _same_settings(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError that names the first setting that differs."""
    for name in sorted({*then, *now}):
        old, new = then.get(name), now.get(name)
        if old != new:
            raise ValueError(
                f"{path} was written with {name}={old!r}, this replay has {name}={new!r}; "
                "remove the journal or name another"
            )


def _key(task: WindowTask) -> tuple[int, ...]:
    return (task.window, *astuple(task.candidate))
