"""Arguments of the wrong kind on one rank are refused on all, and the pool stays usable."""

from __future__ import annotations

import pytest
import torch

import libra
from tests.distributed.cases import make_pool
from tests.distributed.ranks import RankPool

CONFIG = libra.PoolConfig(pool_size=2, block_size=8, chunks=1)


def wrong_on_the_last_rank(rank: int, world_size: int, wrong: str) -> str:
    pool = make_pool(world_size, 1, CONFIG)
    q = torch.randn(16, 2, 4)
    with pool.microbatch([0, 16]):
        bad = rank == world_size - 1
        given = q.numpy() if bad and wrong == "array" else None if bad and wrong == "none" else q
        microbatch = "x" if bad and wrong == "microbatch" else None
        with pytest.raises(ValueError) as told:
            libra.libra_attention(given, q, q, microbatch=microbatch)  # type: ignore[arg-type]
        assert libra.libra_attention(q, q, q).shape == q.shape
    pool.close()
    return str(told.value)


@pytest.mark.parametrize(
    "wrong, named",
    [("none", "NoneType"), ("array", "ndarray"), ("microbatch", "microbatch is 'x'")],
)
def test_a_wrong_kind_of_argument_is_refused_everywhere(
    ranks2: RankPool, wrong: str, named: str
) -> None:
    first, second = ranks2.run(wrong_on_the_last_rank, wrong)
    assert first == second
    assert named in first
