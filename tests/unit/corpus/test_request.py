"""Columns that are chosen or missing, and an error that says where it is."""

from __future__ import annotations

import pickle

import pytest

from libra.corpus.request import CorpusError, Request


def test_lengths_come_before_tokens_and_texts_first_with_a_tokenizer() -> None:
    names = ["id", "text", "input_ids", "num_tokens"]
    assert Request(file="corpus").choose_column(names) == "num_tokens"
    assert Request(file="corpus").choose_column(names[:3]) == "input_ids"
    assert Request(file="corpus", tokenizer=str.split).choose_column(names) == "text"
    assert Request(file="corpus", column="id").choose_column(names) == "id"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, "corpus has none of the usual columns length, .*name one of 'id', 'words'"),
        ("size", "corpus has no column 'size'; it has 'id', 'words'"),
    ],
)
def test_unknown_columns_are_named_with_those_there_are(column: str | None, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        Request(file="corpus", column=column).choose_column(["id", "words"])


def test_an_error_survives_the_way_between_processes() -> None:
    error = CorpusError("corpus", "0 is no length", 2, "line")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "corpus, line 2: 0 is no length"
    assert (copy.file, copy.row) == ("corpus", 2)
