"""`libra simulate` from a corpus to a recommendation, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import libra
from libra.cli.main import main

SMALL = """
[cluster]
preset = "h100"
[model]
name = "small"
layers = 4
hidden = 1024
q_heads = 8
kv_heads = 4
head_dim = 128
ffn = 2048
vocab = 1000
[parallelism]
dp = 4
cp = 2
global_batch = 8
tokens = 8192
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of five windows, and the description of a small model."""
    folder = tmp_path_factory.mktemp("simulate")
    source = np.random.default_rng(0)
    lengths = np.minimum(np.exp(source.normal(5.5, 1.3, size=800)).astype(np.int64) + 1, 8192)
    np.save(folder / "lengths.npy", np.append(lengths, 9000))
    (folder / "small.toml").write_text(SMALL)
    return folder


def command(folder: Path, json: str) -> list[str]:
    """The arguments of a small run that keeps a journal."""
    files = f"--cluster {folder}/small.toml --json {folder}/{json} --journal {folder}/journal.jsonl"
    return f"simulate {folder}/lengths.npy --workers 1 --scale-to 8 {files}".split()


@pytest.fixture(scope="module")
def simulated(folder: Path) -> dict[str, Any]:
    """One run's figures."""
    assert main(command(folder, "found.json")) == 0
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_everything_is_in_the_json(simulated: dict[str, Any]) -> None:
    assert simulated["version"] == 1
    sections = ("corpus", "settings", "packs", "pooling", "candidates", "recommendation")
    compared = ("schemes", "scaling", "workers", "microbatches", "pipeline", "warnings")
    assert set(simulated) == {*sections, *compared, "version", "created", "command"}
    assert simulated["corpus"]["samples"] == 801
    assert simulated["corpus"]["dropped_samples"] == 1
    assert simulated["command"].startswith("libra simulate ")


def test_every_candidate_has_a_step_and_one_is_recommended(simulated: dict[str, Any]) -> None:
    assert [row["pool_size"] for row in simulated["candidates"]] == [2, 4]
    assert all(row["step_seconds"] > 0 and row["fits"] for row in simulated["candidates"])
    line = simulated["recommendation"]["line"]
    config = eval(line, {"libra": libra})
    assert (
        config.pool_size
        == simulated["candidates"][simulated["recommendation"]["candidate"]]["pool_size"]
    )
    assert len(simulated["recommendation"]["trailing"]) == 1


def test_schemes_run_from_ulysses_to_ideal(simulated: dict[str, Any]) -> None:
    rows = {row["key"]: row for row in simulated["schemes"]}
    assert list(rows) == ["ulysses", "wlb", "cluster", "tap", "tap_vrsp", "libra", "ideal"]
    assert rows["ulysses"]["speedup"] == 1
    assert rows["ideal"]["speedup"] >= rows["libra"]["speedup"] > 0
    for row in rows.values():
        parts = sum(row[f"{part}_seconds"] for part in ("attention", "exposed", "other"))
        assert parts == pytest.approx(row["step_seconds"], rel=1e-6)


def test_pools_come_nearer_to_each_other_with_every_step(simulated: dict[str, Any]) -> None:
    for row in simulated["pooling"]:
        assert row["bound"] - 1e-9 <= row["after"] <= row["after_greedy"] + 1e-9
        assert row["after_greedy"] <= row["before"] + 1e-9


def test_a_second_run_takes_what_the_journal_has(
    folder: Path, simulated: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    journal = folder / "journal.jsonl"
    before = journal.read_text()
    assert main(command(folder, "again.json")) == 0
    assert journal.read_text() == before
    again = json.loads((folder / "again.json").read_text())
    assert again["candidates"] == simulated["candidates"]
    printed = capsys.readouterr().out
    assert simulated["recommendation"]["text"] in " ".join(printed.split())
    assert simulated["recommendation"]["line"] in printed


def test_the_json_has_no_nan(folder: Path, simulated: dict[str, Any]) -> None:
    def refuse(word: str) -> float:
        raise AssertionError(word)

    json.loads((folder / "found.json").read_text(), parse_constant=refuse)
    assert not any(math.isnan(row["before"]) for row in simulated["pooling"])


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dp", "3"], "dp 3 does not divide global_batch 128"),
        (["--pool-sizes", "3"], "candidate P=3 B=4096 H=1: P=3 does not divide dp=16"),
        (["--head-shards", "5"], "cannot be cut into 5 head shards"),
        (["--cluster", "h1000"], "cluster has no preset 'h1000'; there are a100, h100"),
        (["--model", "llama"], "model has no preset 'llama'"),
        (["--memory-cap", "0"], "memory_cap is 0.0; it must be a number of GB > 0"),
        (["--buffer", "5"], "buffer=5 is for packing='best-fit' only"),
        (["--json", "/nowhere/x.json"], "the folder /nowhere does not exist"),
        (["--config.placement", "ulysses", "--config.pool-size", "1"], "has no pools to choose"),
        ([], "the corpus has .* tokens.*less than one window"),
        (["--windows", "-1"], "windows is -1; it must be an integer >= 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(folder / "lengths.npy"), "--workers", "1", *options]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    lines = [line for line in told.splitlines() if line.startswith("libra: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]


@pytest.mark.parametrize(
    "lengths, message",
    [
        ("5 -3 7", "-3"),
        ("5 0 7", "0"),
        ("5 nan 7", "nan"),
        ("5 x 7", "x"),
        ("", "no sample|empty"),
    ],
)
def test_bad_lengths_are_refused_with_their_place(
    tmp_path: Path, lengths: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "bad.txt"
    corpus.write_text(lengths)
    assert main(["simulate", str(corpus), "--workers", "1"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told and "bad.txt" in told


def test_standard_input_is_a_corpus_too(
    folder: Path, simulated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.load(folder / "lengths.npy")
    content = io.BytesIO("\n".join(map(str, lengths)).encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(content)))
    arguments = command(folder, "piped.json")
    arguments[1] = "-"
    assert main(arguments[:-2]) == 0
    piped = json.loads((folder / "piped.json").read_text())
    assert piped["corpus"] == {**simulated["corpus"], "source": "-"}


def test_a_typo_in_the_cluster_file_is_named(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(SMALL.replace("hidden", "hiden"))
    assert main(["simulate", str(folder / "lengths.npy"), "--cluster", str(cluster)]) == 2
    told = capsys.readouterr().err
    assert "hiden" in told and "hidden" in told and "cluster.toml" in told
