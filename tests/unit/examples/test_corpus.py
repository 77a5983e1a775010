"""The demo's text: samples cut from the standard library's sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples import corpus


def test_definitions_join_to_the_file_and_keep_their_decorators() -> None:
    source = (
        b"import os\n\n@cache\n@wraps(f)\ndef one():\n    return 1\n\n"
        b"class Two:\n    x = 1\n\n    @property\n    def three(self): ...\n"
    )
    samples = corpus.definitions(source)
    assert b"".join(samples) == source
    assert [sample.splitlines()[0] for sample in samples] == [
        b"import os",
        b"@cache",
        b"class Two:",
        b"    @property",
    ]


def test_source_without_definitions_is_one_sample_and_no_source_is_none() -> None:
    assert corpus.definitions(b"x = 1\n") == [b"x = 1\n"]
    assert corpus.definitions(b"") == []


def test_the_corpus_is_the_same_every_time_and_follows_its_seed() -> None:
    first, again = (corpus.load(tokens=20_000, longest=2048, seed=3) for _ in range(2))
    other = corpus.load(tokens=20_000, longest=2048, seed=4)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.lengths, again.lengths)
    assert not np.array_equal(first.tokens[:1000], other.tokens[:1000])


def test_the_corpus_is_long_tailed_text_in_samples_that_end() -> None:
    text = corpus.load(tokens=400_000, longest=8192)
    assert text.lengths.sum() == len(text.tokens) >= 400_000
    assert text.lengths.max() <= 8192
    assert np.percentile(text.lengths, 99) > 10 * np.median(text.lengths)
    ends = np.cumsum(text.lengths) - 1
    np.testing.assert_array_equal(np.flatnonzero(text.tokens == corpus.END_OF_SAMPLE), ends)
    assert set(np.unique(text.tokens).tolist()) <= set(range(corpus.VOCAB))
    assert b"return" in text.tokens[text.tokens < 256].astype(np.uint8).tobytes()


def test_a_library_too_small_for_the_run_is_refused_with_both_figures(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_bytes(b"x = 1\n")
    with pytest.raises(ValueError, match="hold 7 tokens but 100 are needed"):
        corpus.load(tokens=100, longest=50, root=tmp_path)


def test_installed_packages_and_tests_are_no_part_of_the_library(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "site-packages/d.py", "a/test/e.py", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert corpus.source_files(tmp_path) == [tmp_path / "a/c.py", tmp_path / "b.py"]
