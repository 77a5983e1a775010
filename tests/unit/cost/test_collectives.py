"""Seconds of collectives by hand."""

from __future__ import annotations

from libra.cost.collectives import exchange_seconds, hop_seconds, ring_seconds
from tests.unit.cost.small_machine import CLUSTER


def test_a_group_inside_a_node_moves_its_bytes_over_the_links_within() -> None:
    assert ring_seconds(80.0, 4, CLUSTER) == 60 / 10 + 2 * 1
    assert ring_seconds(80.0, 1, CLUSTER) == 0
    assert ring_seconds(80.0, 2, CLUSTER, stride=2) == 40 / 10 + 1


def test_a_group_over_nodes_is_as_fast_as_the_ports_its_members_of_a_node_have() -> None:
    assert ring_seconds(80.0, 8, CLUSTER) == 70 / 8 + 3 * 3  # four ports
    assert ring_seconds(80.0, 8, CLUSTER, stride=2) == 70 / 4 + 3 * 3
    assert ring_seconds(80.0, 8, CLUSTER, stride=64) == 70 / 2 + 3 * 3


def test_an_exchange_takes_as_long_as_its_slower_link() -> None:
    assert exchange_seconds(80.0, 4, CLUSTER) == 60 / 10 + 2
    assert exchange_seconds(80.0, 8, CLUSTER) == max(30 / 10, 40 / 2) + 9
    assert exchange_seconds(80.0, 1, CLUSTER) == 0


def test_a_hop_crosses_nodes_when_its_stride_does() -> None:
    assert hop_seconds(20.0, CLUSTER, stride=2) == 2 + 1
    assert hop_seconds(20.0, CLUSTER, stride=4) == 10 + 3
