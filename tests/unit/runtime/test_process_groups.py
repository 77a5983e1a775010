"""Who is in a pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from libra.runtime import process_groups
from libra.runtime.process_groups import Membership, find_membership
from tests.distributed.threads import threaded_ranks


def membership(
    shape: dict[str, int],
    rank: int,
    pool_size: int,
    monkeypatch: pytest.MonkeyPatch,
    dp: str | tuple[str, ...] = "dp",
) -> Membership:
    """This rank's membership on a mesh of these dimensions."""
    ranks = torch.arange(torch.Size(shape.values()).numel()).view(*shape.values())
    mesh: Any = SimpleNamespace(
        mesh=ranks, mesh_dim_names=tuple(shape), get_coordinate=lambda: rank in ranks or None
    )
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    return find_membership(mesh, pool_size, dp, "cp")


def test_pools_are_neighbouring_replicas_with_their_cp_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = membership({"pp": 2, "dp": 4, "cp": 2}, 6, 2, monkeypatch)
    assert found.pools == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert (found.pool, found.worker, found.replica, found.cp_size) == (1, 2, 1, 2)
    assert found.ranks == (4, 5, 6, 7)


def test_other_dimensions_may_lie_between(monkeypatch: pytest.MonkeyPatch) -> None:
    found = membership({"dp": 2, "tp": 2, "cp": 2}, 3, 2, monkeypatch)
    assert found.pools == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert (found.pool, found.worker) == (1, 1)


def test_data_parallelism_may_have_two_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = membership({"replicate": 2, "shard": 2}, 3, 4, monkeypatch, ("replicate", "shard"))
    assert found.pools == ((0, 1, 2, 3),)
    assert found.cp_size == 1


def test_a_missing_dimension_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"dimensions \('data',\), not \['dp'\]; name its data"):
        membership({"data": 2}, 0, 2, monkeypatch)


def test_a_pool_size_has_to_divide_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pool_size 2 does not divide the data-parallel size 3"):
        membership({"dp": 3}, 0, 2, monkeypatch)


def test_a_rank_outside_the_mesh_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="outside the mesh"):
        membership({"dp": 2}, 5, 2, monkeypatch)


def check_history(rank: int, world_size: int) -> None:
    process_groups._check_equal_history(range(world_size))


def test_ranks_with_different_numbers_of_groups_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert threaded_ranks(3, check_history) == [None] * 3
    monkeypatch.setattr(process_groups, "group_count", lambda: 4 + dist.get_rank() // 2)
    (error, *others) = threaded_ranks(3, check_history, expect_error=True)
    assert "ranks 0, 1 has groups 4; rank 2 has groups 5; give SequencePool the mesh" in error
    assert set(others) == {error}
