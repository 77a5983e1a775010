"""Where commands print and write: refusals before any work, and folders that are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from libra.cli.console import check_outputs, table_console, writing


def test_a_pipe_is_as_wide_as_the_table_needs() -> None:
    assert table_console(140).width >= 140


@pytest.mark.parametrize(
    "files, message",
    [
        ({"--json": "."}, "--json . is a folder; name a file"),
        ({"--json": "new", "--html": "./new"}, "--html new and --json must be different files"),
        ({"--json": "new", "--html": "link"}, "--html link and --json must be different files"),
        ({"--json": None, "--html": "corpus.txt"}, "--html corpus.txt and the corpus must be"),
        ({"--json": "no/such/x.json"}, "cannot be written: the folder no/such does not exist"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_with_its_option(
    files: dict[str, str | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("1 2 3")
    Path("link").symlink_to("new")
    paths = {option: None if name is None else Path(name) for option, name in files.items()}
    with pytest.raises(ValueError, match=message):
        check_outputs(paths, corpus="corpus.txt")
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.txt", "link"}


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser may write anywhere, so the system's answer is replaced.
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(ValueError, match=r"x\.json cannot be written: no permission"):
        check_outputs({"--json": tmp_path / "new" / "x.json"}, make_folders=True)


def test_writing_makes_the_folder_and_names_what_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    check_outputs({"--json": path}, make_folders=True)
    with writing("--json", path):
        path.write_text("{}")
    message = r"--json .*y\.json cannot be written: File exists"
    with pytest.raises(ValueError, match=message), writing("--json", path / "y.json"):
        raise AssertionError("its folder is a file")
