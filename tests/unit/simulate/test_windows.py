"""Windows of a stream of lengths: the packs of the whole corpus, whatever the chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from libra.data.packing import Packs, pack_best_fit, pack_sequential
from libra.simulate.results import CorpusSummary
from libra.simulate.windows import (
    Pieces,
    WindowReader,
    bin_edges,
    cut_longer,
    stream_best_fit,
    stream_sequential,
    whole_samples,
)

IntArray = NDArray[np.int64]
Fragment = tuple[int, int, int]


def chunked(lengths: IntArray, seed: int, most: int) -> Iterator[IntArray]:
    """The lengths in chunks of random sizes, empty ones among them."""
    rng = np.random.default_rng(seed)
    first = 0
    while first < len(lengths):
        stop = first + int(rng.integers(0, most + 1))
        yield lengths[first:stop]
        first = stop


def fragments(packs: Packs, first: int = 0, count: int | None = None) -> list[list[Fragment]]:
    stop = len(packs) if count is None else first + count
    return [
        list(
            zip(
                packs.samples[packs.pieces_of(i)].tolist(),
                packs.starts[packs.pieces_of(i)].tolist(),
                packs.lengths_of(i).tolist(),
                strict=True,
            )
        )
        for i in range(first, stop)
    ]


def read(reader: WindowReader, packs: int) -> tuple[list[list[Fragment]], CorpusSummary]:
    """All packs of all windows, and the counts; no window where the corpus fills none."""
    windows: list[Packs] = []
    try:
        windows.extend(reader)
    except ValueError:
        assert not windows
    for window in windows:
        assert len(window) == packs
        assert window.offsets[0] == 0
        assert window.offsets[-1] == len(window.lengths)
    return [pack for window in windows for pack in fragments(window)], reader.summary


def check_counts(counts: CorpusSummary, lengths: IntArray, tokens: int, packs: list[Any]) -> None:
    """What must hold of the counts whatever the packing; `packs` are those of all windows."""
    in_windows = sum(length for pack in packs for _, _, length in pack)
    assert counts.samples == len(lengths)
    assert counts.tokens == lengths.sum()
    assert counts.longest == lengths.max()
    assert in_windows + counts.left_over_tokens + counts.dropped_tokens == counts.tokens
    assert in_windows + counts.padding_tokens == len(packs) * tokens
    assert sum(counts.histogram.samples) == len(lengths)
    assert sum(counts.histogram.tokens) == counts.tokens


def summary(*chunks: list[int]) -> CorpusSummary:
    """What a reader counts of some chunks, whether or not they fill a window."""
    reader = WindowReader([np.array(each, dtype=np.int64) for each in chunks], tokens=8, packs=2)
    return read(reader, 2)[1]


some_lengths = st.lists(st.integers(1, 2**31) | st.integers(1, 100), min_size=1, max_size=60)
streams = {
    "seed": st.integers(0, 2**32),
    "samples": st.integers(1, 300),
    "longest": st.sampled_from([3, 30, 100]),
    "most": st.sampled_from([1, 7, 60, 400]),
    "tokens": st.integers(1, 64),
    "packs": st.integers(1, 6),
}


@settings(max_examples=50)
@given(**streams, longer=st.sampled_from(["drop", "cut"]))
def test_windows_in_sequence_are_the_packs_of_the_whole_corpus(
    seed: int, samples: int, longest: int, most: int, tokens: int, packs: int, longer: Any
) -> None:
    lengths = np.random.default_rng(seed).integers(1, longest + 1, samples)
    reader = WindowReader(chunked(lengths, seed, most), tokens=tokens, packs=packs, longer=longer)
    found, counts = read(reader, packs)
    kept = lengths <= tokens if longer == "drop" else np.ones(samples, dtype=bool)
    whole = int(lengths[kept].sum()) // tokens // packs * packs
    if whole:
        expected = pack_sequential(lengths, tokens, longer=longer)
        assert found == fragments(expected, 0, whole)
    assert len(found) == whole
    assert counts.windows == whole // packs
    assert counts.dropped_samples == int((~kept).sum())
    assert counts.cut_samples == (int((lengths > tokens).sum()) if longer == "cut" else 0)
    check_counts(counts, lengths, tokens, found)


@settings(max_examples=50)
@given(**streams, buffer=st.integers(1, 80))
def test_windows_of_best_fit_are_the_packs_of_the_whole_corpus(
    seed: int, samples: int, longest: int, most: int, tokens: int, packs: int, buffer: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, longest + 1, samples)
    reader = WindowReader(
        chunked(lengths, seed, most), tokens=tokens, packs=packs, packing="best-fit", buffer=buffer
    )
    found, counts = read(reader, packs)
    expected = []
    if (lengths <= tokens).any():
        expected = fragments(pack_best_fit(lengths, tokens, longer="drop", buffer=buffer))
    whole = len(expected) // packs * packs
    assert found == expected[:whole]
    assert counts.dropped_samples == int((lengths > tokens).sum())
    assert counts.dropped_tokens == int(lengths[lengths > tokens].sum())
    check_counts(counts, lengths, tokens, found)


@settings(max_examples=50)
@given(**streams, buffer=st.integers(1, 80))
def test_best_fit_cuts_longer_samples_into_pieces_of_a_pack_and_a_rest(
    seed: int, samples: int, longest: int, most: int, tokens: int, packs: int, buffer: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, longest + 1, samples)
    reader = WindowReader(
        chunked(lengths, seed, most),
        tokens=tokens,
        packs=packs,
        packing="best-fit",
        longer="cut",
        buffer=buffer,
    )
    found, counts = read(reader, packs)
    pieces = [
        (sample, start, min(tokens, length - start))
        for sample, length in enumerate(lengths.tolist())
        for start in range(0, length, tokens)
    ]
    expected = pack_best_fit([length for _, _, length in pieces], tokens, buffer=buffer)
    packed = [
        [pieces[i] for i, _, _ in pack]
        for pack in fragments(expected, 0, len(expected) // packs * packs)
    ]
    assert found == packed
    assert counts.cut_samples == int((lengths > tokens).sum())
    assert counts.dropped_samples == counts.dropped_tokens == 0
    check_counts(counts, lengths, tokens, found)


def test_best_fit_chooses_from_4096_samples_unless_told() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 20_000).astype(np.int64) + 1
    reader = WindowReader([lengths], tokens=8192, packs=4, packing="best-fit")
    found, _ = read(reader, 4)
    expected = pack_best_fit(lengths, 8192, longer="drop")
    assert found == fragments(expected, 0, len(found))
    assert len(found) == len(expected) // 4 * 4


def test_counts_are_those_of_a_small_corpus() -> None:
    reader = WindowReader([[3, 9], [5, 4, 4, 7]], tokens=8, packs=2)
    (window,) = reader
    assert fragments(window) == [[(0, 0, 3), (2, 0, 5)], [(3, 0, 4), (4, 0, 4)]]
    counts = reader.summary
    assert (counts.samples, counts.tokens, counts.longest) == (6, 32, 9)
    assert (counts.dropped_samples, counts.dropped_tokens) == (1, 9)
    assert (counts.left_over_tokens, counts.padding_tokens, counts.windows) == (7, 0, 1)
    assert counts.histogram.samples == (1, 2, 1, 0, 1, 0, 1)
    assert counts.histogram.edges == (3, 4, 5, 6, 7, 8, 9, 10)


def test_bins_cover_every_length_once_and_are_at_most_a_ninth_wide() -> None:
    edges = bin_edges()
    assert edges[0] == 1 and edges[-1] == 2**31 + 1
    assert (np.diff(edges) > 0).all()
    assert edges[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    low, high = edges[:-1], edges[1:] - 1
    assert (high - low <= low / 9).all()
    assert {2**i for i in range(32)} <= set(edges.tolist())


@given(some_lengths, some_lengths)
def test_every_sample_and_token_is_counted_in_its_bin(some: list[int], more: list[int]) -> None:
    found, lengths = summary(some, [], more), some + more
    bins = zip(found.histogram.samples, found.histogram.tokens, strict=True)
    for (low, high), (samples, tokens) in zip(pairwise(found.histogram.edges), bins, strict=True):
        inside = [n for n in lengths if low <= n < high]
        assert (samples, tokens) == (len(inside), sum(inside))
    assert (found.samples, found.longest) == (len(lengths), max(lengths))
    assert found.mean == sum(lengths) / len(lengths)


@given(some_lengths)
def test_the_median_lies_in_the_bin_of_the_true_one(lengths: list[int]) -> None:
    true = float(np.quantile(lengths, 0.5, method="inverted_cdf"))
    found = summary(lengths).median
    edges = bin_edges()
    assert np.searchsorted(edges, found, "right") == np.searchsorted(edges, true, "right")


def test_the_median_of_many_samples_is_near_the_true_one() -> None:
    lengths = np.random.default_rng(0).lognormal(6.4, 1.2, 100_000).astype(np.int64) + 1
    assert summary(lengths.tolist()).median == pytest.approx(np.median(lengths), rel=0.02)


def test_nothing_has_an_empty_histogram() -> None:
    nothing = summary([])
    assert nothing.histogram.samples == () and nothing.median == nothing.mean == 0


def test_memory_is_bounded_however_long_the_stream_is() -> None:
    """A stream that never ends gives windows as it goes."""

    def endless() -> Iterator[IntArray]:
        while True:
            yield np.full(1000, 10)

    for packing in ("sequential", "best-fit"):
        windows = iter(WindowReader(endless(), tokens=100, packs=8, packing=packing))
        for _ in range(500):
            assert next(windows).workloads.tolist() == [1000] * 8


@pytest.mark.parametrize("packing", ["sequential", "best-fit"])
def test_a_million_samples_are_packed_and_counted_in_a_second(packing: Any) -> None:
    lengths = np.random.default_rng(0).lognormal(6.4, 1.4, 1_000_000).astype(np.int64) + 1
    for _ in WindowReader([lengths[:20_000]], tokens=65536, packs=4, packing=packing):
        pass  # compile
    begin = time.process_time()
    reader = WindowReader(np.array_split(lengths, 8), tokens=1 << 18, packs=128, packing=packing)
    assert sum(1 for _ in reader) > 30
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize(
    "chunks, message",
    [
        ([], "the corpus is empty"),
        ([[]], "the corpus is empty"),
        ([[3, 4]], r"7 tokens, less than one window of packs=2 packs of tokens=8"),
        ([[9, 3]], r"3 tokens \(1 of 2 samples are longer than a pack and were dropped\)"),
        ([[3], [4, 0]], r"from sample 1 of the corpus\)\[1\] is 0"),
        ([[3], [-4]], r"from sample 1 of the corpus\)\[0\] is -4"),
        ([[3], [float("nan")]], r"from sample 1 of the corpus\)\[0\] is nan"),
        ([[3], ["4"]], r"from sample 1 of the corpus\)\[0\] is '4'"),
    ],
)
@pytest.mark.parametrize("packing", ["sequential", "best-fit"])
def test_a_corpus_that_fills_no_window_is_refused(
    packing: Any, chunks: list[Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        list(WindowReader(chunks, tokens=8, packs=2, packing=packing))


def test_longer_samples_are_refused_by_choice_and_named() -> None:
    with pytest.raises(ValueError, match=r"sample 2 of the corpus has 9 tokens.*longer='cut'"):
        list(WindowReader([[3, 4], [9]], tokens=8, packs=1, longer="refuse"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": 2**31}, r"less than 2\^31"),
        ({"packs": True}, "packs is True"),
        ({"packing": "first-fit"}, "packing is 'first-fit'; choose one of 'sequential'"),
        ({"longer": "keep"}, "longer is 'keep'; choose one of 'refuse'"),
        ({"buffer": 10}, "buffer is 10 but packing is 'sequential'"),
        ({"buffer": 0, "packing": "best-fit"}, "buffer is 0"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowReader([[3]], **{"tokens": 8, "packs": 2, **arguments})


def test_a_reader_reads_once() -> None:
    reader = WindowReader([[8]], tokens=8, packs=1)
    assert len(list(reader)) == 1
    with pytest.raises(ValueError, match="reads its corpus once"):
        iter(reader)


def pieces(*lengths: int, first: int = 0) -> Pieces:
    return whole_samples(np.array(lengths, dtype=np.int64), first)


def test_a_longer_sample_becomes_pieces_of_a_pack_and_a_rest() -> None:
    cut = cut_longer(pieces(3, 9, 4, first=7), 4)
    assert cut.tolist() == [[3, 4, 4, 1, 4], [7, 8, 8, 8, 9], [0, 0, 4, 8, 0], [0] * 5]


def test_in_sequence_a_sample_is_cut_at_the_end_of_a_pack_and_its_rest_waits() -> None:
    stream = [pieces(5, 7, 4), pieces(), pieces(6, 2, first=3)]
    runs = [run.tolist() for run in stream_sequential(stream, 8) if run.size]
    assert runs == [
        [[5, 3, 4, 4], [0, 1, 1, 2], [0, 0, 3, 0], [1, 0, 1, 0]],
        [[6, 2], [3, 4], [0, 0], [1, 0]],
    ]


def test_in_sequence_the_incomplete_pack_never_comes() -> None:
    runs = list(stream_sequential([pieces(5), pieces(2, first=1)], 8))
    assert not any(run.size for run in runs)


def test_best_fit_keeps_samples_whole_and_ends_with_the_stream() -> None:
    runs = list(stream_best_fit([pieces(5, 7), pieces(3, 1, first=2)], 8, buffer=2))
    packed = np.concatenate(runs, axis=1)
    firsts = np.flatnonzero(packed[3])
    packs = [each[1].tolist() for each in np.split(packed, firsts[1:], axis=1)]
    lengths = {0: 5, 1: 7, 2: 3, 3: 1}
    assert firsts[0] == 0
    assert sorted(sample for pack in packs for sample in pack) == [0, 1, 2, 3]
    assert all(sum(lengths[sample] for sample in pack) <= 8 for pack in packs)
