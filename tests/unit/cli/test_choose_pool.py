"""From a corpus to one pool: which packs it has, and pools that do not exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libra.cli.choose_pool import choose_pool

# Five packs of 64 tokens, and a sample that fits none.
LENGTHS = np.array([64, 32, 32, 100, 16, 16, 16, 16, 40, 24, 64])
SHAPE: dict[str, Any] = {"tokens": 64, "global_batch": 2, "pool_size": 1}


def test_a_pool_is_counted_through_the_corpus_and_through_its_window() -> None:
    # The packs of window 1 are 2 and 3 of the corpus; pools of one pack have the heaviest first.
    chosen = choose_pool(LENGTHS, **SHAPE, window=1, pool=0, file="corpus.txt")
    assert [bounds.tolist() for bounds in chosen.cu_seqlens] == [[0, 40, 64]]
    origin = chosen.origin
    assert (origin.file, origin.samples, origin.dropped_samples, origin.packs) == (
        *("corpus.txt", 11, 1, 5),
    )
    assert (origin.pools, origin.pool_packs, origin.pool_samples) == (2, [3], 2)
    assert origin.pools_imbalance == pytest.approx(2 * 2176 / (2176 + 1024) - 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"window": 2}, "--window 2 does not exist: 5 packs of 64 tokens make 2 windows"),
        ({"pool": 2}, "--pool 2 does not exist: a window has 2 pools"),
        ({"pool": -1}, "--pool is -1; it must be an integer >= 0"),
        ({"global_batch": 0}, "--global-batch is 0; it must be an integer >= 1"),
    ],
)
def test_a_pool_that_does_not_exist_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_pool(LENGTHS, **SHAPE | changes)
