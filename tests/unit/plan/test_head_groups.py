"""How heads are cut into shards, chunks and head_groups."""

from __future__ import annotations

import numpy as np
import pytest

from libra.config import HeadShape
from libra.plan.head_groups import cut_heads


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# Every head shape of up to 24 query heads with every H and M that cut it.
CUTS = [
    (HeadShape(q=q, kv=kv, dim=1), head_shards, chunks)
    for q in range(1, 25)
    for kv in divisors(q)
    for head_shards in divisors(q)
    for chunks in divisors(q // head_shards)
]


def test_shards_chunks_and_kv_heads_of_every_query_head_are_those_of_its_head_group() -> None:
    for heads, head_shards, chunks in CUTS:
        head_groups = cut_heads(heads, head_shards, chunks)
        width = heads.q // head_shards
        head = np.arange(heads.q)
        head_group = head // head_groups.heads
        assert np.array_equal(head_group // head_groups.per_shard, head // width)
        assert np.array_equal(head_groups.chunk(head_group), head % width // (width // chunks))
        assert np.array_equal(
            head_groups.kv_head_group(head_group), head // heads.group // head_groups.kv_heads
        )
        assert (head_groups.shards, head_groups.chunks) == (head_shards, chunks)
        assert head_groups.count * head_groups.heads == heads.q
        assert head_groups.kv_count * head_groups.kv_heads == heads.kv


def test_no_head_group_splits_a_query_group() -> None:
    for heads, head_shards, chunks in CUTS:
        head_groups = cut_heads(heads, head_shards, chunks)
        for head_group in range(head_groups.count):
            first, last = head_group * head_groups.heads, (head_group + 1) * head_groups.heads - 1
            whole_groups = first % heads.group == 0 and (last + 1) % heads.group == 0
            assert whole_groups or first // heads.group == last // heads.group


def test_every_chunk_of_a_shard_has_the_same_head_groups_so_the_same_bytes_and_work() -> None:
    for cut in CUTS:
        head_groups = cut_heads(*cut)
        head_group = np.arange(head_groups.count)
        chunk = head_group // head_groups.per_shard * head_groups.chunks + head_groups.chunk(
            head_group
        )
        assert np.bincount(chunk).tolist() == [head_groups.per_chunk] * (
            head_groups.shards * head_groups.chunks
        )


def test_six_query_heads_over_three_kv_heads_on_two_shards_travel_head_by_head() -> None:
    head_groups = cut_heads(HeadShape(q=6, kv=3, dim=8), 2, 1)
    assert (head_groups.heads, head_groups.kv_heads) == (1, 1)
    assert head_groups.kv_head_group(np.arange(6)).tolist() == [0, 0, 1, 1, 2, 2]


def test_whole_groups_travel_together() -> None:
    head_groups = cut_heads(HeadShape(q=8, kv=2, dim=8), 1, 1)
    assert (head_groups.heads, head_groups.kv_heads, head_groups.count, head_groups.kv_count) == (
        8,
        2,
        1,
        1,
    )


def test_chunks_narrower_than_a_group_share_its_kv_head() -> None:
    head_groups = cut_heads(HeadShape(q=8, kv=2, dim=8), 1, 4)
    assert (head_groups.heads, head_groups.kv_heads) == (2, 1)
    assert head_groups.kv_head_group(np.arange(4)).tolist() == [0, 0, 1, 1]
    assert head_groups.chunk(np.arange(4)).tolist() == [0, 1, 2, 3]


def test_heads_that_do_not_divide_are_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ValueError, match=r"6 query heads .*4 head shards.*head_shards \(H\)"):
        cut_heads(HeadShape(q=6, kv=3, dim=8), 4, 1)
    with pytest.raises(ValueError, match=r"3 query heads \(6 / H=2\).*2 chunks.*chunks \(M\)"):
        cut_heads(HeadShape(q=6, kv=3, dim=8), 2, 2)
