"""Packing a stream: whole packs as soon as they are full, the rest held back."""

from __future__ import annotations

import numpy as np

from libra.simulate.stream_packing import (
    OPENS,
    Pieces,
    cut_longer,
    stream_best_fit,
    stream_sequential,
    whole_samples,
)


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
    firsts = np.flatnonzero(packed[OPENS])
    packs = [each[1].tolist() for each in np.split(packed, firsts[1:], axis=1)]
    lengths = {0: 5, 1: 7, 2: 3, 3: 1}
    assert firsts[0] == 0
    assert sorted(sample for pack in packs for sample in pack) == [0, 1, 2, 3]
    assert all(sum(lengths[sample] for sample in pack) <= 8 for pack in packs)
