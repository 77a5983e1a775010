"""Samples to packs: what is cut, what stays whole, what is padding, what is left out."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.data.lengths import check_cu_seqlens, workloads
from libra.data.packing import Packs, pack_best_fit, pack_sequential

Piece = tuple[int, int, int]
"""Sample, first token in it, tokens."""


def pieces(packs: Packs) -> list[list[Piece]]:
    return [
        list(
            zip(
                packs.samples[packs.pieces_of(i)].tolist(),
                packs.starts[packs.pieces_of(i)].tolist(),
                packs.lengths_of(i).tolist(),
                strict=True,
            )
        )
        for i in range(len(packs))
    ]


def sequential_reference(lengths: list[int], tokens: int) -> list[list[Piece]]:
    """Token by token: the last pack may be incomplete."""
    stream = [(sample, at) for sample, n in enumerate(lengths) for at in range(n)]
    packs = []
    for first in range(0, len(stream), tokens):
        pack: list[Piece] = []
        for sample, at in stream[first : first + tokens]:
            if pack and pack[-1][0] == sample:
                pack[-1] = (sample, pack[-1][1], pack[-1][2] + 1)
            else:
                pack.append((sample, at, 1))
        packs.append(pack)
    return packs


def best_fit_reference(lengths: list[int], tokens: int, buffer: int) -> list[list[int]]:
    """The rule of `pack_best_fit` over a plain list of waiting samples."""
    coming = list(range(len(lengths)))
    waiting: list[int] = []
    packs: list[list[int]] = []
    room = -1
    while coming or waiting:
        if coming and len(waiting) <= buffer - max(1, buffer // 16):
            more = buffer - len(waiting)
            waiting, coming = waiting + coming[:more], coming[more:]
        if room < 0:
            packs.append([])
            room, sample = tokens, waiting[0]
        else:
            fitting = [s for s in waiting if lengths[s] <= room]
            if not fitting:
                room = -1
                continue
            sample = min(fitting, key=lambda s: (-lengths[s], s))
        packs[-1].append(sample)
        waiting.remove(sample)
        room -= lengths[sample]
    return packs


corpora = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@given(corpora, st.integers(1, 25))
def test_sequential_packing_is_the_token_stream_cut_every_l_tokens(
    lengths: list[int], tokens: int
) -> None:
    packs = pack_sequential(lengths, tokens, longer="cut", drop_last=False)
    assert pieces(packs) == sequential_reference(lengths, tokens)
    assert packs.padding.tolist() == [0] * (len(packs) - 1) + [-sum(lengths) % tokens]
    assert packs.dropped_tokens == 0


@given(corpora, st.integers(1, 25))
def test_dropping_the_last_pack_changes_no_other(lengths: list[int], tokens: int) -> None:
    whole = sum(lengths) // tokens
    if not whole:
        return
    packs = pack_sequential(lengths, tokens, longer="cut")
    assert pieces(packs) == sequential_reference(lengths, tokens)[:whole]
    assert packs.dropped_tokens == sum(lengths) % tokens
    assert not packs.padding.any()


@given(corpora, st.integers(1, 25))
def test_samples_longer_than_a_pack_are_dropped_and_counted_by_choice(
    lengths: list[int], tokens: int
) -> None:
    kept = [i for i, n in enumerate(lengths) if n <= tokens]
    if not kept:
        return
    packs = pack_sequential(lengths, tokens, longer="drop", drop_last=False)
    expected = [
        [(kept[s], at, n) for s, at, n in pack]
        for pack in sequential_reference([lengths[i] for i in kept], tokens)
    ]
    assert pieces(packs) == expected
    assert packs.dropped_samples == len(lengths) - len(kept)


def test_a_sample_that_ends_where_a_pack_ends_is_not_cut() -> None:
    packs = pack_sequential([4, 4, 3, 5], 8)
    assert pieces(packs) == [[(0, 0, 4), (1, 0, 4)], [(2, 0, 3), (3, 0, 5)]]


def test_a_cut_sample_goes_on_as_a_sample_of_its_own() -> None:
    packs = pack_sequential([5, 7, 4], 8)
    assert pieces(packs) == [[(0, 0, 5), (1, 0, 3)], [(1, 3, 4), (2, 0, 4)]]
    assert packs.workloads.tolist() == [25 + 9, 16 + 16]


def test_padding_lies_after_the_end_of_cu_seqlens() -> None:
    packs = pack_sequential([5, 7], 8, drop_last=False)
    assert packs.cu_seqlens(1).dtype == np.int32
    assert packs.cu_seqlens(1).tolist() == [0, 4]
    assert packs.padding.tolist() == [0, 4]
    assert check_cu_seqlens(packs.cu_seqlens(1), tokens=packs.tokens).tolist() == [0, 4]


def test_packs_iterate_as_their_lengths() -> None:
    packs = pack_sequential([5, 7, 4], 8)
    assert [pack.tolist() for pack in packs] == [[5, 3], [4, 4]]
    assert workloads(packs).tolist() == packs.workloads.tolist()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_pack_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="of 2"):
        pack_sequential([5, 7, 4], 8).cu_seqlens(index)


@pytest.mark.parametrize("longest", [4, 40])  # ties are the rule, ties are rare
@given(seed=st.integers(0, 2**32), tokens=st.integers(40, 100), buffer=st.integers(1, 80))
def test_best_fit_follows_its_rule(longest: int, seed: int, tokens: int, buffer: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, rng.integers(1, 200)).tolist()
    packs = pack_best_fit(lengths, tokens, buffer=buffer)
    expected = best_fit_reference(lengths, tokens, buffer)
    assert [[sample for sample, _, _ in pack] for pack in pieces(packs)] == expected


@given(corpora, st.integers(40, 100), st.integers(1, 30))
def test_best_fit_keeps_every_sample_whole_and_counts_the_padding(
    lengths: list[int], tokens: int, buffer: int
) -> None:
    packs = pack_best_fit(lengths, tokens, buffer=buffer)
    assert sorted(f for pack in pieces(packs) for f in pack) == [
        (sample, 0, n) for sample, n in enumerate(lengths)
    ]
    assert (packs.padding >= 0).all()
    assert int(packs.padding.sum()) == len(packs) * tokens - sum(lengths)


def test_best_fit_takes_the_longest_sample_that_fits() -> None:
    packs = pack_best_fit([6, 3, 5, 4, 2], 10, buffer=5)
    assert [pack.tolist() for pack in packs] == [[6, 4], [3, 5, 2]]


def test_a_pack_stays_open_while_a_small_buffer_is_filled_up() -> None:
    packs = pack_best_fit([1] * 100, 50, buffer=4)
    assert [len(pack) for pack in packs] == [50, 50]


def test_best_fit_drops_samples_that_are_too_long_by_choice_and_keeps_their_index() -> None:
    packs = pack_best_fit([3, 9, 4], 8, longer="drop")
    assert packs.samples.tolist() == [0, 2]
    assert packs.dropped_samples == 1


def test_best_fit_wastes_little_of_a_long_tailed_corpus() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(np.int64) + 1
    packs = pack_best_fit(lengths, 8192, longer="drop", buffer=1024)
    assert packs.padding.sum() / (len(packs) * 8192) < 0.001


@pytest.mark.parametrize("pack", [pack_sequential, pack_best_fit])
def test_a_million_samples_are_packed_in_two_seconds(pack: Callable[..., Packs]) -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 1_000_000).astype(np.int64) + 1
    pack(lengths[:1000], 65536, longer="drop")  # compile
    times = []
    for _ in range(2):
        start = time.process_time()
        pack(lengths, 65536, longer="drop")
        times.append(time.process_time() - start)
    assert min(times) < 2.0


@pytest.mark.parametrize("pack", [pack_sequential, pack_best_fit])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"lengths": [], "tokens": 8}, "corpus is empty"),
        ({"lengths": [3, 0], "tokens": 8}, r"lengths\[1\] is 0"),
        ({"lengths": [3, 2.5], "tokens": 8}, r"lengths\[1\] is 2.5"),
        ({"lengths": [3], "tokens": 0}, "tokens is 0"),
        ({"lengths": [3], "tokens": True}, "tokens is True"),
        ({"lengths": [3], "tokens": 2**31}, r"less than 2\^31"),
        (
            {"lengths": [3, 9, 12], "tokens": 8},
            r"lengths\[1\] is 9, longer than a pack of tokens=8 \(2 of 3 .*longer='drop'",
        ),
        ({"lengths": [9], "tokens": 8, "longer": "drop"}, "all 1 samples are longer"),
        (
            {"lengths": [3], "tokens": 8, "longer": "split"},
            "longer is 'split'; choose one of 'refuse'",
        ),
    ],
)
def test_a_corpus_that_cannot_be_packed_is_refused_by_name(
    pack: Callable[..., Packs], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(**arguments)


def test_best_fit_may_not_cut() -> None:
    with pytest.raises(ValueError, match="longer is 'cut'"):
        pack_best_fit([9], 8, longer="cut")  # type: ignore[arg-type]


def test_a_buffer_of_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer is 0"):
        pack_best_fit([3], 8, buffer=0)


def test_a_corpus_that_fills_no_pack_is_refused_unless_padded() -> None:
    with pytest.raises(ValueError, match="5 tokens, less than one pack of tokens=8"):
        pack_sequential([2, 3], 8)
    assert pack_sequential([2, 3], 8, drop_last=False).cu_seqlens(0).tolist() == [0, 2, 5]
