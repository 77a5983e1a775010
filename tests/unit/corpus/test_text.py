"""Lengths from .npy, text and JSON lines, and texts that a tokenizer counts."""

from __future__ import annotations

import io
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.corpus import CorpusError, load_lengths, read_lengths

lists = st.lists(st.integers(1, 2**31), min_size=1, max_size=50)


def npy(array: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array), **how)
    return buffer.getvalue()


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(tmp_path: Path, content: bytes, name: str = "corpus", **how: Any) -> list[int]:
    path = tmp_path / name
    path.write_bytes(content)
    found: list[int] = load_lengths(path, **how).tolist()
    return found


def refuse(tmp_path: Path, content: bytes, message: str, **how: Any) -> CorpusError:
    """The error of reading `content`, which names the file."""
    with pytest.raises(CorpusError, match=message) as error:
        read(tmp_path, content, **how)
    assert str(error.value).startswith(str(tmp_path))
    return error.value


@given(lists, st.sampled_from(["<u4", ">i8", "<u8", "<i8"]), st.integers(1, 60))
def test_an_array_is_read_in_chunks(
    tmp_path: Path, lengths: list[int], dtype: str, chunk: int
) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(lengths, dtype=dtype))
    chunks = list(read_lengths(path, chunk=chunk))
    assert [len(c) for c in chunks[:-1]] == [chunk] * (len(chunks) - 1)
    assert 1 <= len(chunks[-1]) <= chunk
    assert {c.dtype for c in chunks} == {np.dtype(np.int64)}
    assert np.concatenate(chunks).tolist() == lengths


@given(lists, st.integers(1, 60), st.sampled_from(["\n", " ", ",", "\t", ", ", "\r\n"]))
def test_text_is_read_in_chunks_whatever_parts_the_integers(
    tmp_path: Path, lengths: list[int], chunk: int, between: str
) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(between.join(map(str, lengths)).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("libra.corpus.text._BLOCK", 20 + chunk)
        chunks = list(read_lengths(path, chunk=chunk))
    assert all(1 <= len(c) <= chunk for c in chunks)
    assert np.concatenate(chunks).tolist() == lengths


@given(lists, st.integers(1, 60))
def test_json_lines_of_lengths_and_of_tokens_are_read_in_chunks(
    tmp_path: Path, lengths: list[int], chunk: int
) -> None:
    path = tmp_path / "corpus.jsonl"
    short = [n % 7 + 1 for n in lengths]
    rows = [{"id": 0, "length": n, "x": [0] * m} for n, m in zip(lengths, short, strict=True)]
    path.write_bytes(jsonl(*rows))
    assert np.concatenate(list(read_lengths(path, chunk=chunk))).tolist() == lengths
    chunks = list(read_lengths(path, column="x", chunk=chunk))
    assert np.concatenate(chunks).tolist() == short


def test_blank_lines_and_comments_mean_nothing_in_text(tmp_path: Path) -> None:
    text = "# lengths, é\n3\n\n  4,5  # two\n\n#6\n7"
    assert read(tmp_path, text.encode()) == [3, 4, 5, 7]
    assert read(tmp_path, b"\xef\xbb\xbf3\r\n4\r\n") == [3, 4]


@pytest.mark.parametrize("block", [8, 9, 16, 1000])
def test_a_comment_is_no_number_wherever_a_block_ends(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.corpus.text._BLOCK", block)
    text = "1 2 # " + "3 " * 50 + "\n4\n" + "# 5 6 7 8\n" * 20 + "9"
    assert read(tmp_path, text.encode()) == [1, 2, 4, 9]


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("content", "message", "line"),
    [
        (b"1 2\n\n3, four", "line 3: 'four' is no integer", 3),
        (b"# x\n1 2.5", "line 2: '2.5' is no integer", 2),
        (b"5\n5 0 7", r"line 2: 0 is no length; a sample has 1 to 2\^31 tokens", 2),
        (b"1\n-2", "line 2: -2 is no length", 2),
        (b"1\n2147483649", "line 2: 2147483649 is no length", 2),
        (b"1\n" + b"9" * 5000, "line 2: '9999", 2),
        (b"1\nnan\n", "line 2: 'nan' is no integer", 2),
        (b"1\n1_000\n", "line 2: '1_000' is no integer", 2),
        ("1\n\N{DEVANAGARI DIGIT TWO}\n".encode(), "is no integer", 2),
        (b"", "holds no sample length", None),
        (b" \n# nothing\n", "holds no sample length", None),
        (bytes(range(256)), "neither of a known binary format nor text", None),
    ],
)
def test_text_that_is_no_list_of_lengths_is_refused_with_its_line(
    tmp_path: Path, content: bytes, message: str, line: int | None, chunk: int
) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as error:
        list(read_lengths(path, chunk=chunk))
    assert (error.value.file, error.value.row) == (str(path), line)


def test_a_word_that_never_ends_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    refuse(tmp_path, b"1 " + b"a" * 40_000_000, "line 1: 'aaaa")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, np.nan]), r"holds float64 of shape \(2,\)"),
        (np.ones((2, 2), dtype=np.int64), r"holds int64 of shape \(2, 2\)"),
        (np.array([True]), "holds bool"),
        (np.array(["1"]), "holds <U1"),
        (np.array([1, "a"], dtype=object), "holds Python objects"),
        (np.array([3, 0]), "row 1: 0 is no length"),
        (np.array([3, 4, -7]), "row 2: -7 is no length"),
        (np.array([2**63], dtype=np.uint64), "row 0: 9223372036854775808 is no length"),
        (np.array([], dtype=np.int64), "holds no sample length"),
    ],
)
def test_arrays_that_hold_no_lengths_are_refused(tmp_path: Path, array: Any, message: str) -> None:
    refuse(tmp_path, npy(array, allow_pickle=True), message)


def test_rows_are_counted_through_all_chunks(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.append(np.ones(100, dtype=np.int64), 0))
    with pytest.raises(CorpusError, match="row 100: 0"):
        list(read_lengths(path, chunk=7))


def test_an_array_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    whole = npy(np.arange(1, 101))
    for end in (len(whole) - 1, len(whole) - 8, len(whole) - 400):
        error = refuse(tmp_path, whole[:end], "row .*: is cut short: its header says 100 rows")
        assert error.row == (end - 128) // 8
    for end in (0, 3, 6, 20, 127):
        refuse(tmp_path, whole[:end], "no .npy array of integers", name="lengths.npy")
    refuse(tmp_path, whole + npy([7]), "goes on after the 100 rows")
    assert read(tmp_path, npy([7, 8]).replace(b"\x93NUMPY\x01", b"\x93NUMPY\x01")) == [7, 8]
    refuse(tmp_path, npy([7]).replace(b"\x93NUMPY\x01", b"\x93NUMPY\x09"), "version")


def test_nothing_that_a_file_holds_is_run(tmp_path: Path) -> None:
    refuse(tmp_path, pickle.dumps([1, 2]), "neither of a known binary format nor text")


def test_an_array_larger_than_memory_may_be(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.ones(4_000_000, dtype=np.uint32))
    tracemalloc.start()
    assert sum(len(chunk) for chunk in read_lengths(path, chunk=10_000)) == 4_000_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_the_first_line_decides_what_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, jsonl({"num_tokens": 3}, {"num_tokens": 4})) == [3, 4]
    assert read(tmp_path, jsonl({"input_ids": [1, 2], "text": "a"})) == [2]
    assert read(tmp_path, jsonl({"length": 5, "input_ids": [1, 2]})) == [5]
    assert read(tmp_path, jsonl({"length": 5, "input_ids": [1, 2]}), column="input_ids") == [2]
    assert read(tmp_path, b'\n {"length": 5}\r\n\n{"length": 6}') == [5, 6]
    assert read(tmp_path, b'\xef\xbb\xbf{"length": 5}') == [5]


def test_texts_are_counted_by_any_tokenizer(tmp_path: Path) -> None:
    class Encoder:
        def encode(self, text: str) -> list[str]:
            return text.split()

    class BatchEncoder:
        def encode_batch(self, texts: list[str]) -> list[list[str]]:
            return [text.split() for text in texts]

    content = jsonl({"text": "a b c", "length": 1}, {"text": "é", "length": 1})
    tokenizers: list[Any] = [
        str.split,
        Encoder(),
        BatchEncoder(),
        lambda text: {"input_ids": text.split(), "attention_mask": []},
        lambda text: len(text.split()),
    ]
    for tokenizer in tokenizers:
        assert read(tmp_path, content, tokenizer=tokenizer) == [3, 1]
    refuse(tmp_path, content, "holds text in 'text'; give a tokenizer", column="text")
    empty = jsonl({"text": "a"}, {"text": ""})
    assert refuse(tmp_path, empty, "line 2: 0 is no length", tokenizer=str.split).row == 2
    with pytest.raises(ValueError, match="tokenizer is 7; it must be"):
        read(tmp_path, content, tokenizer=7)


def test_a_tokenizer_by_name_needs_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("tokenizers", "transformers"):
        monkeypatch.setitem(__import__("sys").modules, library, None)
    for name in ("some/model", str(Path(__file__))):
        with pytest.raises(ValueError, match="not installed: pip install 'tokenizers'"):
            read(tmp_path, jsonl({"text": "a"}), tokenizer=name)


@pytest.mark.parametrize(
    ("content", "message", "line"),
    [
        (b'{"length": 5}\n{"length": 5', "line 2: .* is no JSON", 2),
        (b'{"length": 5}\n{"length": 5} {"length": 6}', "line 2: .* is no JSON .*follows", 2),
        (b'{"length": 5}\n\n[5]', "line 3: .* is no JSON object", 3),
        (jsonl({"length": 5}, {"size": 5}), "line 2: has no key 'length'", 2),
        (jsonl({"length": 5}, {"length": None}), "line 2: 'length' is None; line 1 has int", 2),
        (jsonl({"length": 5}, {"length": "6"}), "line 2: 'length' is '6'", 2),
        (jsonl({"length": 5}, {"length": 6.0}), "line 2: 'length' is 6.0", 2),
        (jsonl({"length": 5}, {"length": True}), "line 2: 'length' is True", 2),
        (jsonl({"length": 5}, {"length": float("nan")}), "line 2: 'length' is nan", 2),
        (jsonl({"length": 5}, {"length": 0}), "line 2: 0 is no length", 2),
        (jsonl({"length": 5}, {"length": -1}), "line 2: -1 is no length", 2),
        (jsonl({"length": 10**400}), "line 1: 0x", 1),
        (jsonl({"input_ids": [1]}, {"input_ids": []}), "line 2: 0 is no length", 2),
        (jsonl({"length": 5.5}), "line 1: 'length' is 5.5; it must be an integer", 1),
        (b'{"length": "\xff"}', "line 1: .* is no JSON", 1),
        (b"{" + b'"a":{' * 100_000, "line 1: .* is no JSON", 1),
    ],
)
def test_json_lines_that_hold_no_length_are_refused_with_their_line(
    tmp_path: Path, content: bytes, message: str, line: int
) -> None:
    assert refuse(tmp_path, content, message).row == line
