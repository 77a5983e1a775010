"""A replay that was cut off goes on where it was, and never with figures of something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libra.config import PoolConfig
from libra.cost import CLUSTERS
from libra.simulate.replay import CandidateReplay, replay
from libra.simulate.replay_window import LIBRA, WindowTask
from libra.simulate.results import Candidate
from libra.simulate.sample import every_window
from tests.unit.simulate.small_cluster import CANDIDATES, WINDOWS, make_setting
from tests.unit.simulate.test_replay import settled

JOURNALED = WINDOWS[:3]
OTHER_CLUSTER = replace(make_setting(), time=replace(make_setting().time, cluster=CLUSTERS["a100"]))


def run(journal: Path, **changes: Any) -> list[CandidateReplay]:
    arguments: dict[str, Any] = {
        "windows": JOURNALED,
        "candidates": CANDIDATES,
        "setting": make_setting(),
        "journal": journal,
        **changes,
    }
    return replay(sample=every_window(len(arguments["windows"])), **arguments)


def explode(task: WindowTask) -> None:
    raise AssertionError("a window was planned that the journal has")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "replay.jsonl"
    run(path)
    return path


def test_what_is_in_the_journal_is_not_done_again(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(journal)
    text = journal.read_text()
    monkeypatch.setattr("libra.simulate.replay.replay_window", explode)
    again = run(journal)
    # planning times too: exactly what was written
    assert again == before
    assert journal.read_text() == text
    assert len(text.splitlines()) == 1 + len(JOURNALED) * len(CANDIDATES)


def test_a_run_that_was_cut_off_goes_on(journal: Path) -> None:
    whole = run(journal)
    data = journal.read_bytes()
    kept = data.splitlines(keepends=True)
    for cut in (0, len(kept[0]) - 3, len(kept[0]), len(kept[0]) + 10, len(data) - 1):
        journal.write_bytes(data[:cut])
        workers = 2 if cut == len(kept[0]) + 10 else 1
        assert [settled(each) for each in run(journal, workers=workers)] == [
            settled(each) for each in whole
        ]
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        assert len({tuple(line["task"]) for line in lines[1:]}) == len(lines) - 1 == len(kept) - 1


def test_a_run_that_stops_keeps_what_is_done(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise StoppedError

    journal = tmp_path / "replay.jsonl"
    with pytest.raises(StoppedError):
        run(journal, progress=stop)
    assert len(journal.read_text().splitlines()) == 4
    run(journal)


def test_more_candidates_and_windows_may_join(journal: Path) -> None:
    more = [*CANDIDATES, Candidate(8, 512, 1)]
    found = run(journal, candidates=more)
    assert len(journal.read_text().splitlines()) == 1 + 3 * len(JOURNALED)
    assert [settled(each) for each in found[:2]] == [settled(each) for each in run(journal)]


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"setting": make_setting(cp=4)}, "cp_size=2.*cp_size=4"),
        ({"setting": make_setting(heads=(8, 2, 32))}, "heads="),
        ({"setting": make_setting(PoolConfig(tolerance=0.1))}, "config=.*0.03.*0.1"),
        ({"setting": make_setting(dp=8)}, "dp_size=16.*dp_size=8"),
        ({"setting": OTHER_CLUSTER}, "time=.*H100.*A100"),
        ({"windows": JOURNALED[1:]}, "other packs"),
    ],
)
def test_a_journal_of_another_replay_is_refused(
    journal: Path, changes: dict[str, Any], name: str
) -> None:
    text = journal.read_text()
    with pytest.raises(ValueError, match=name):
        run(journal, **changes)
    assert journal.read_text() == text


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"refine": False}, "refine=True"),
        ({"order": "index"}, "order='grouped'"),
        ({"pack_placement": "contiguous"}, "placement='vrsp'"),
    ],
)
def test_a_journal_of_pools_made_otherwise_is_refused(
    journal: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr("libra.simulate.replay.LIBRA", replace(LIBRA, **changes))
    with pytest.raises(ValueError, match=name):
        run(journal)


@pytest.mark.parametrize(
    "content, message",
    [
        ("a list of things to do\n", "line 1"),
        ("a file without an end of line", "is no journal"),
        ('{"kind":"libra replay 0","settings":{}}\n', "'libra replay 0'"),
        ("[1, 2]\n", "line 1"),
    ],
)
def test_another_file_is_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        run(path)
    assert path.read_text() == content


def test_damage_before_the_last_line_is_an_error(journal: Path) -> None:
    lines = journal.read_text().splitlines(keepends=True)
    for damaged in ("nonsense\n", '{"task":[0,2],"digest":"","figures":{}}\n', "\n"):
        journal.write_text("".join([lines[0], damaged, *lines[2:]]))
        with pytest.raises(ValueError, match="line 2"):
            run(journal)
