"""Packed rows of an attention call: sets without a common key, and few copies of the keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from libra.runtime.kernels.packed import key_sets, pack
from tests.unit.runtime.kernels.kernel_cases import CPU, Case, cases, make_segments


@settings(max_examples=60)
@given(case=cases())
def test_key_sets_hold_each_segment_once_and_no_key_twice(case: Case) -> None:
    s = case.segments
    sets = key_sets(s)
    assert sorted(np.concatenate(sets).tolist()) == list(range(len(s)))
    for members in sets:
        readers = np.zeros(case.k_shape[:2], dtype=np.int64)
        for i in members:
            keys = slice(s.k_start[i], s.k_start[i] + s.k_len[i])
            readers[keys, s.kv_head[i] : s.kv_head[i] + s.kv_heads] += 1
        assert readers.max() == 1


def test_there_are_as_many_key_sets_as_the_most_shared_key_has_readers() -> None:
    rows = [(i, 1, start, 4, 0, head) for i, (start, head) in enumerate([(0, 0), (2, 0), (4, 0)])]
    rows += [(9, 1, 0, 4, 0, 1)]
    assert len(key_sets(make_segments(*rows, heads=1, kv_heads=1))) == 2


def test_calls_gather_no_more_than_the_allowed_copies_of_their_keys() -> None:
    rows = [(i, 1, 0, 100, 0, 0) for i in range(10)]
    segments = make_segments(*rows, heads=1, kv_heads=1)
    for duplication, calls in ((1, 10), (4, 3), (10, 1)):
        packed = pack(segments, CPU, duplication)
        assert len(packed.parts) == calls
        assert all(call.k.count <= 100 * duplication for call in packed.parts)
