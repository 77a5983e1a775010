"""Clusters: the nodes that they give a pool."""

from __future__ import annotations

from libra.config import PoolConfig
from tests.unit.cost.small_machine import CLUSTER


def test_a_pool_has_the_nodes_of_its_cluster_unless_it_names_its_own() -> None:
    assert CLUSTER.with_nodes(PoolConfig(), tp=2).ranks_per_node == 2
    assert CLUSTER.with_nodes(PoolConfig(), tp=8).ranks_per_node == 1
    assert CLUSTER.with_nodes(PoolConfig(ranks_per_node=16), tp=2).ranks_per_node == 16
