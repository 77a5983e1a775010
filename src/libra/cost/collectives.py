"""Seconds of collectives.

Simplifications.  Every group runs its collective alone, at `collective_efficiency` of the link.
A group that fits in a node uses the links within; one that does not is as fast as the network
between nodes, into which all its members of a node send at the same time, each over its own port.
Latency grows with the logarithm of the group.
"""

from __future__ import annotations

from libra.cost.hardware import Cluster


def ring_seconds(whole: float, ranks: int, cluster: Cluster, *, stride: int = 1) -> float:
    """Seconds of a reduce-scatter or an all-gather of `whole` bytes over every `stride`-th rank, of
    `ranks` ranks.

    Each rank sends and receives (ranks - 1) / ranks of the whole; an all-reduce is two of these.
    """
    if ranks == 1:
        return 0.0
    members = _members(ranks, cluster, stride)
    bandwidth = cluster.within_node
    # Over several nodes every member of a node sends over its own port; for example 16 ranks on
    # nodes of 8 GPUs have 8 ports of 50 GB/s each, 400 GB/s, next to 450 GB/s within the nodes.
    if members < ranks:
        bandwidth = min(bandwidth, members * cluster.between_nodes)
    moved = whole * (ranks - 1) / ranks
    return moved / (bandwidth * cluster.collective_efficiency) + _latency(ranks, members, cluster)


def exchange_seconds(held: float, ranks: int, cluster: Cluster, *, stride: int = 1) -> float:
    """Seconds of an all-to-all in which each of `ranks` ranks sends its `held` bytes to all ranks,
    evenly.
    """
    if ranks == 1:
        return 0.0
    members = _members(ranks, cluster, stride)
    # Of the `ranks` equal parts of a rank's bytes, one stays, those of its node's other members
    # travel within the node, and the rest between nodes, both at the same time.
    near = held * (members - 1) / ranks / cluster.within_node
    far = held * (ranks - members) / ranks / cluster.between_nodes
    return max(near, far) / cluster.collective_efficiency + _latency(ranks, members, cluster)


def hop_seconds(sent: float, cluster: Cluster, *, stride: int) -> float:
    """Seconds to send `sent` bytes to the rank `stride` away, as pipeline stages do."""
    if stride < cluster.ranks_per_node:
        bandwidth, latency = cluster.within_node, cluster.within_node_latency
    else:
        bandwidth, latency = cluster.between_nodes, cluster.between_nodes_latency
    return sent / (bandwidth * cluster.collective_efficiency) + latency


def _members(ranks: int, cluster: Cluster, stride: int) -> int:
    """Ranks of the group that share a node."""
    return min(ranks, max(1, cluster.ranks_per_node // stride))


def _latency(ranks: int, members: int, cluster: Cluster) -> float:
    # A tree over the group: the logarithm of its size, rounded up (8 ranks take 3 rounds).
    rounds = (ranks - 1).bit_length()
    inside = members == ranks
    return rounds * (cluster.within_node_latency if inside else cluster.between_nodes_latency)
