"""Which tokens a context-parallel rank holds, and the labels that go with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config import ShardLayout
from libra.data.cp_shards import local_labels, local_positions, shard_map
from tests.pools import sample_bounds
from tests.slow_planner import shard_holders

LAYOUTS = st.sampled_from(["contiguous", "zigzag"])


def test_a_contiguous_shard_is_one_run() -> None:
    assert [local_positions(8, 2, r).tolist() for r in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_zigzag_shard_is_a_head_and_a_tail_piece() -> None:
    positions = [local_positions(8, 2, r, "zigzag").tolist() for r in range(2)]
    assert positions == [[0, 1, 6, 7], [2, 3, 4, 5]]
    positions = [local_positions(12, 3, r, "zigzag").tolist() for r in range(3)]
    assert positions == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_tokens_that_do_not_divide_give_the_first_pieces_one_more() -> None:
    assert [len(local_positions(10, 4, r)) for r in range(4)] == [3, 3, 2, 2]
    positions = [local_positions(7, 2, r, "zigzag").tolist() for r in range(2)]
    assert positions == [[0, 1, 6], [2, 3, 4, 5]]


def test_fewer_tokens_than_ranks_leave_ranks_empty() -> None:
    assert [local_positions(2, 4, r).tolist() for r in range(4)] == [[0], [1], [], []]
    positions = [local_positions(3, 2, r, "zigzag").tolist() for r in range(2)]
    assert positions == [[0], [1, 2]]


@given(st.integers(1, 60), st.integers(1, 9), LAYOUTS)
def test_shards_hold_every_token_once_in_ascending_order(
    tokens: int, cp_size: int, layout: ShardLayout
) -> None:
    holders = shard_holders(tokens, cp_size, layout)
    for rank in range(cp_size):
        expected = [t for t in range(tokens) if holders[t] == rank]
        assert local_positions(tokens, cp_size, rank, layout).tolist() == expected


@given(st.integers(1, 60), st.integers(1, 9), LAYOUTS)
def test_fragments_tile_the_pack_and_name_the_row_of_their_first_token(
    tokens: int, cp_size: int, layout: ShardLayout
) -> None:
    shards = shard_map(tokens, cp_size, layout)
    assert shards.start[0] == 0
    assert shards.stop[-1] == tokens
    assert np.array_equal(shards.start[1:], shards.stop[:-1])
    assert (shards.stop > shards.start).all()
    assert (np.diff(shards.rank) != 0).all()  # a rank's neighbouring pieces are one fragment
    for rank, start, stop, local in zip(
        shards.rank, shards.start, shards.stop, shards.local, strict=True
    ):
        rows = local_positions(tokens, cp_size, int(rank), layout)[local : local + stop - start]
        assert np.array_equal(rows, np.arange(start, stop))


def test_zigzag_on_one_rank_is_the_whole_pack_in_one_fragment() -> None:
    assert len(shard_map(9, 1, "zigzag").start) == 1


def test_labels_of_a_zigzag_shard_are_shifted_before_the_shard_is_taken() -> None:
    labels = local_labels(np.arange(8), [0, 8], 2, 0, "zigzag")  # rows 0, 1, 6, 7
    assert labels.tolist() == [1, 2, 7, -100]
    assert labels.dtype == np.int64


def test_labels_stop_at_every_sample_end_and_in_padding() -> None:
    tokens = [10, 11, 12, 13, 14, 15, 16, 17]
    ends = [11, -100, 13, 14, -100, -100, -100, -100]
    assert local_labels(tokens, [0, 2, 5], 1, 0).tolist() == ends
    assert local_labels(tokens, [0, 2, 2, 5, 5], 1, 0).tolist() == ends  # empty samples are none
    assert local_labels(tokens, [0], 1, 0).tolist() == [-100] * 8


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), sample_bounds(n))), st.data())
def test_labels_of_all_ranks_are_the_next_tokens_of_the_pack(
    pack: tuple[int, list[int]], data: st.DataObject
) -> None:
    tokens, bounds = pack
    cp_size, layout = data.draw(st.integers(1, 5)), data.draw(LAYOUTS)
    ids = 1000 + np.arange(tokens)
    expected = [
        1001 + t if t + 1 < bounds[-1] and t + 1 not in bounds else -100 for t in range(tokens)
    ]
    found = np.zeros(tokens, dtype=np.int64)
    for rank in range(cp_size):
        rows = local_positions(tokens, cp_size, rank, layout)
        found[rows] = local_labels(ids, bounds, cp_size, rank, layout)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "tokens, cp_size, layout, message",
    [
        (0, 2, "contiguous", "pack of 0 tokens over CP 2: both must be >= 1"),
        (8, 0, "contiguous", "pack of 8 tokens over CP 0"),
        (8, -1, "zigzag", "pack of 8 tokens over CP -1"),
        (8, 2, "ring", "layout is 'ring'; choose one of 'contiguous', 'zigzag'"),
    ],
)
def test_shards_that_cannot_be_are_refused(
    tokens: int, cp_size: int, layout: ShardLayout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shard_map(tokens, cp_size, layout)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"cp_rank {rank} is outside \[0, 2\)"):
        local_positions(8, 2, rank)
    with pytest.raises(ValueError, match=rf"cp_rank {rank} is outside \[0, 2\)"):
        local_labels(range(8), [0, 8], 2, rank)


@pytest.mark.parametrize(
    "bounds, message",
    [
        ([0, 9], "cu_seqlens ends at 9 but the pack has 8 tokens"),
        ([], "cu_seqlens is empty"),
        ([1, 8], "cu_seqlens starts at 1; it must start at 0"),
        ([0, 5, 3, 8], "cu_seqlens falls from 5 to 3"),
        ([0.0, 8.0], r"cu_seqlens\[0\] is 0.0"),
    ],
)
def test_bounds_that_do_not_fit_the_pack_have_no_labels(bounds: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_labels(range(8), bounds, 2, 0)
