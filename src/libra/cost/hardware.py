"""The hardware model of all commands: rates of one GPU, and the links between GPUs.

Units are SI: bytes, bytes/s, FLOP/s, seconds; GB means 1e9 bytes.  Data sheets give NVLink for both
directions together and tensor throughput often with sparsity; here both are one direction and
dense.

Simplifications.  A node's GPUs are joined all to all, each with its own share of the network,
and the network between nodes has full bisection.  Real machines reach less than their data sheets:
`matmul_fraction` and `collective_efficiency` say how much, and are assumptions until measured
(`libra calibrate` measures the first; a collective benchmark such as nccl-tests the second).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from libra.config import PoolConfig, check_fields
from libra.cost.fields import read_presets

AttentionFigures = Literal["flash-2", "flash-3", "flash-4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One kind of GPU and the links between them."""

    name: str
    """Name in reports."""

    peak_flops: float
    """Dense bf16 FLOP/s of one GPU, as the vendor states it."""

    memory_bytes: float
    """Bytes of device memory of one GPU."""

    memory_bandwidth: float
    """Bytes/s between a GPU and its own memory."""

    within_node: float
    """Bytes/s that one GPU sends, and at the same time receives, inside its node."""

    between_nodes: float
    """Bytes/s that one GPU sends, and at the same time receives, across nodes."""

    within_node_latency: float = 10e-6
    """Seconds before the first byte inside a node.  Default: an assumption, of the order of a
    small NCCL collective over NVLink.
    """

    between_nodes_latency: float = 30e-6
    """Seconds before the first byte across nodes.  Default: an assumption, of the order of a small
    NCCL collective over a few nodes.
    """

    ranks_per_node: int = 8
    """GPUs of one node."""

    matmul_fraction: float = 0.7
    """Share of `peak_flops` that large bf16 matrix products reach.  Default: an assumption."""

    collective_efficiency: float = 0.8
    """Share of a link's bytes/s that large collectives reach.  Default: an assumption."""

    usable_memory: float = 0.92
    """Share of `memory_bytes` that tensors can use; the rest is the driver's, the communication
    library's and lost to fragmentation.  Default: an assumption.
    """

    attention_figures: AttentionFigures = "flash-3"
    """Published attention figures to use where no calibrated table is given."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            zero=("within_node_latency", "between_nodes_latency"),
            shares=("matmul_fraction", "collective_efficiency", "usable_memory"),
        )

    @property
    def matmul_flops(self) -> float:
        """FLOP/s of large bf16 matrix products."""
        return self.peak_flops * self.matmul_fraction

    @property
    def tensor_bytes(self) -> float:
        """Bytes of device memory that tensors can use."""
        return self.memory_bytes * self.usable_memory

    def workers_per_node(self, tp: int) -> int:
        """Workers of `tp` GPUs each that share a node."""
        return max(1, self.ranks_per_node // tp)

    def with_nodes(self, config: PoolConfig, *, tp: int = 1) -> PoolConfig:
        """`config` with this cluster's nodes, unless its `ranks_per_node` was changed."""
        # The default of PoolConfig stands for "not given".
        if config.ranks_per_node != PoolConfig().ranks_per_node:
            return config
        return config.replace(ranks_per_node=self.workers_per_node(tp))


CLUSTERS: Final[Mapping[str, Cluster]] = read_presets(Cluster, "cluster")
"""Presets by the name that `--cluster` and description files use."""
