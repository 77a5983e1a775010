"""Lengths from Megatron's index, written here byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.corpus import CorpusError, load_lengths, read_lengths

LENGTHS = [5, 1, 900, 3, 70, 2]
DOCUMENTS = [0, 1, 3, 4, 6]
"""First sequence of each of four documents, then six."""


def index(
    lengths: list[int] = LENGTHS,
    documents: list[int] | None = None,
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    dtype: int = 8,
    modes: bool = False,
) -> bytes:
    bounds = list(range(len(lengths) + 1)) if documents is None else documents
    sizes = np.array(lengths, dtype="<i4")
    pointers = np.cumsum([0, *(2 * n for n in lengths)])[:-1].astype("<i8")
    return b"".join(
        [
            magic,
            struct.pack("<QBQQ", version, dtype, len(lengths), len(bounds)),
            sizes.tobytes(),
            pointers.tobytes(),
            np.array(bounds, dtype="<i8").tobytes(),
            bytes(len(lengths)) if modes else b"",
        ]
    )


def read(tmp_path: Path, content: bytes, **how: Any) -> list[int]:
    path = tmp_path / "corpus_text_document.idx"
    path.write_bytes(content)
    found: list[int] = np.concatenate(list(read_lengths(path, **how))).tolist()
    return found


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_samples_are_documents_or_sequences_by_choice(
    tmp_path: Path, modes: bool, chunk: int
) -> None:
    plain = index(modes=modes)
    assert read(tmp_path, plain, chunk=chunk) == LENGTHS
    split = index(documents=DOCUMENTS, modes=modes)
    assert read(tmp_path, split, chunk=chunk) == [5, 901, 3, 72]
    assert read(tmp_path, split, chunk=chunk, column="sequences") == LENGTHS


def test_the_index_is_told_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(index())
    assert load_lengths(tmp_path / "index").tolist() == LENGTHS


def test_every_sequence_must_lie_in_the_tokens_beside_the_index(tmp_path: Path) -> None:
    tokens = tmp_path / "corpus_text_document.bin"
    tokens.write_bytes(bytes(2 * sum(LENGTHS)))
    assert read(tmp_path, index()) == LENGTHS
    tokens.write_bytes(bytes(2 * sum(LENGTHS) - 1))
    with pytest.raises(CorpusError, match=r"sequence 5: lies at bytes 1958 to 1962 of .*1961"):
        read(tmp_path, index())


def test_an_index_that_is_cut_short_or_too_long_is_refused(tmp_path: Path) -> None:
    whole = index()
    for end in range(len(whole)):
        with pytest.raises(CorpusError, match=r"cut short or damaged|is no Megatron index"):
            read(tmp_path, whole[:end])
    with pytest.raises(CorpusError, match="cut short or damaged"):
        read(tmp_path, whole + b"\0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (index(magic=b"TNTIDX\0\0\0"), "no Megatron index: .* older, unmapped kind"),
        (index(version=2), "version 2; only 1 is known"),
        (index(dtype=9), "unknown token type 9"),
        (index(dtype=0), "unknown token type 0"),
        (index([]), "holds no sample length"),
        (index([], []), "holds no sample length"),
        (index([3, 0, 2]), "document 1: 0 is no length"),
        (index([3, -4, 2]), "sequence 1: -4 is no length"),
        (index([3, 4], [1, 2]), "starts its documents at sequence 1, not 0"),
        (index([3, 4], [0, 1]), "2 sequences, of which its documents hold only 1"),
        (index([3, 4], [0]), "2 sequences, of which its documents hold only 0"),
        (index([3, 4], [0, 1, 1, 2]), "document 1: has the sequences 1 to 1 of 2"),
        (index([3, 4], [0, 2, 1, 2]), "document 1: has the sequences 2 to 1 of 2"),
        (index([3, 4], [0, 3]), "document 0: has the sequences 0 to 3 of 2"),
    ],
)
def test_an_index_that_cannot_be_trusted_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        read(tmp_path, content)


def test_sequences_of_no_token_are_refused_too(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="sequence 1: 0 is no length"):
        read(tmp_path, index([3, 0, 2]), column="sequences")
    with pytest.raises(CorpusError, match="no column 'input_ids'; choose one of documents"):
        read(tmp_path, index(), column="input_ids")
