"""Columns that are chosen or missing, and an error that says where it is."""

from __future__ import annotations

import pickle

import pytest

from libra.corpus.request import CorpusError, Request, choose_column


def test_lengths_come_before_tokens_and_texts_first_with_a_tokenizer() -> None:
    names = ["id", "text", "input_ids", "num_tokens"]
    assert choose_column(Request(), names, "corpus") == "num_tokens"
    assert choose_column(Request(), names[:3], "corpus") == "input_ids"
    assert choose_column(Request(tokenizer=str.split), names, "corpus") == "text"
    assert choose_column(Request(column="id"), names, "corpus") == "id"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, "corpus has none of the usual columns length, .*name one of 'id', 'words'"),
        ("size", "corpus has no column 'size'; it has 'id', 'words'"),
    ],
)
def test_unknown_columns_are_named_with_those_there_are(column: str | None, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        choose_column(Request(column=column), ["id", "words"], "corpus")


def test_an_error_survives_the_way_between_processes() -> None:
    error = CorpusError("corpus", "0 is no length", 2, "line")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "corpus, line 2: 0 is no length"
    assert (copy.file, copy.row) == ("corpus", 2)
