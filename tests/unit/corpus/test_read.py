"""Formats found by content and name, folders of shards, standard input, and refusals."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from libra.corpus import CorpusError, load_lengths, read_lengths

NPY = io.BytesIO()
np.save(NPY, np.array([3, 4]))


def test_what_a_file_holds_counts_before_its_name(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([3, 4]))
    (tmp_path / "lengths.npy").rename(tmp_path / "lengths.txt")
    assert load_lengths(tmp_path / "lengths.txt").tolist() == [3, 4]
    (tmp_path / "lengths.csv").write_text("3\n4\n")
    assert load_lengths(tmp_path / "lengths.csv").tolist() == [3, 4]
    (tmp_path / "corpus").write_text('\n {"length": 3}\n')
    assert load_lengths(tmp_path / "corpus").tolist() == [3]


def test_the_format_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text('{"length": 3}')
    assert load_lengths(tmp_path / "lengths", format="jsonl").tolist() == [3]
    with pytest.raises(CorpusError, match=r"line 1: .* is no integer"):
        load_lengths(tmp_path / "lengths", format="text")
    with pytest.raises(CorpusError, match=r"no .npy array"):
        load_lengths(tmp_path / "lengths", format="npy")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lengths.npy", r"is no .npy array"),
        ("corpus.idx", "is no Megatron index"),
        ("corpus.parquet", "cannot be read as Parquet"),
        ("corpus.arrow", "cut short"),
        ("corpus.jsonl", "line 1: .* is no JSON object"),
    ],
)
def test_a_name_that_promises_a_format_is_believed_where_the_content_says_nothing(
    tmp_path: Path, name: str, message: str
) -> None:
    if name in ("corpus.parquet", "corpus.arrow"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text("1 \n")
    with pytest.raises(CorpusError, match=message):
        load_lengths(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04...", "is a zip archive"),
        (b"\x28\xb5\x2f\xfd...", "compressed by zstd; pipe it in"),
        (b"BZh9...", "compressed by bzip2"),
    ],
)
def test_archives_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "lengths.npy").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        load_lengths(tmp_path / "lengths.npy")


def test_a_folder_of_shards_is_read_by_name(tmp_path: Path) -> None:
    for name, lengths in (("b.txt", "5"), ("a.txt", "3 4"), ("c.txt", "# none"), (".x.txt", "9")):
        (tmp_path / name).write_text(lengths)
    (tmp_path / "README.md").write_text("about")
    assert load_lengths(tmp_path).tolist() == [3, 4, 5]
    np.save(tmp_path / "d.npy", np.array([7]))
    with pytest.raises(CorpusError, match=r"mixes formats \(a.txt, d.npy\)"):
        load_lengths(tmp_path)
    assert load_lengths(tmp_path, format="npy").tolist() == [7]
    with pytest.raises(CorpusError, match=r"holds no file that ends in .parquet"):
        load_lengths(tmp_path, format="parquet")


def test_an_error_in_a_shard_names_the_shard(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("3")
    (tmp_path / "b.txt").write_text("0")
    with pytest.raises(CorpusError, match=r"b.txt, line 1: 0 is no length"):
        load_lengths(tmp_path)


def test_a_folder_that_lacks_a_numbered_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00003.txt").write_text("3")
    (tmp_path / "train-00002-of-00003.txt").write_text("5")
    with pytest.raises(CorpusError, match=r"holds 2 of the 3 files train-\*-of-00003.txt"):
        load_lengths(tmp_path)
    (tmp_path / "train-00001-of-00003.txt").write_text("4")
    assert load_lengths(tmp_path).tolist() == [3, 4, 5]


def test_a_cache_of_datasets_is_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "cache-0f.arrow").write_bytes(b"")
    with pytest.raises(CorpusError, match="is a cache of Hugging Face datasets"):
        load_lengths(tmp_path)


def test_folders_and_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"is a folder with neither state.json"):
        load_lengths(tmp_path)
    for format in (None, "npy", "parquet", "huggingface", "megatron"):
        if format == "parquet":
            pytest.importorskip("pyarrow")
        with pytest.raises(CorpusError, match=r"missing.* cannot be read"):
            load_lengths(tmp_path / "missing", format=format)  # type: ignore[arg-type]
    (tmp_path / "file.txt").write_text("1")
    with pytest.raises(CorpusError, match="cannot be read: Not a directory"):
        load_lengths(tmp_path / "file.txt" / "inside")


@pytest.mark.parametrize("named", ["mds", "mds/index.json"])
def test_an_mds_dataset_is_refused_with_the_way_to_read_it(tmp_path: Path, named: str) -> None:
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "index.json").write_text(json.dumps({"version": 2, "shards": []}))
    with pytest.raises(CorpusError, match=r"is an MDS dataset .*convert lengths to .npy"):
        load_lengths(tmp_path / named)
    (tmp_path / "index.json").write_text('{"length": 5}')
    assert load_lengths(tmp_path / "index.json", format="jsonl").tolist() == [5]
    np.save(tmp_path / "mds" / "lengths.npy", np.array([3]))
    assert load_lengths(tmp_path / "mds", format="npy").tolist() == [3]


@pytest.mark.parametrize("content", [NPY.getvalue(), b"3\n4\n", b'{"length": 3}\n{"length": 4}'])
@pytest.mark.parametrize("zipped", [False, True])
def test_standard_input_is_told_by_what_it_holds(
    content: bytes, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = gzip.compress(content) if zipped else content
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))
    assert load_lengths("-").tolist() == [3, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input holds no sample length"),
        (b"3\n0\n", "standard input, line 2: 0 is no length"),
        (b"PAR1", "standard input is parquet, which can be read from a file only"),
    ],
)
def test_errors_of_standard_input_name_it(
    content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content))))
    with pytest.raises(CorpusError, match=message):
        load_lengths("-")


def test_a_zipped_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt.gz"
    lengths = np.random.default_rng(0).integers(1, 10_000, 5000)
    whole = gzip.compress("\n".join(map(str, lengths)).encode())
    path.write_bytes(whole)
    assert load_lengths(path).tolist() == lengths.tolist()
    for content in (whole[:-1], whole[: len(whole) // 2], whole[:5000] + b"xx" + whole[5002:]):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"lengths.txt.gz.* (is cut short|cannot be read)"):
            load_lengths(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "csv"}, "format is 'csv'; choose one of 'npy', 'text'"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_lengths("lengths.npy", **arguments)


def test_reading_a_plain_list_imports_nothing_slow() -> None:
    program = (
        "import sys; from libra.corpus import load_lengths\n"
        "assert load_lengths('-').tolist() == [3, 4]\n"
        "print(sorted({'torch', 'numba', 'pyarrow', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="3\n4", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
