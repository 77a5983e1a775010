"""A small model on a machine of round numbers."""

from __future__ import annotations

import dataclasses

from libra.cost import Cluster, Model, Parallelism

MODEL = Model(name="small", layers=4, hidden=8, q_heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=32)
SPARSE = dataclasses.replace(MODEL, experts=8, active_experts=2)
SPREAD = Parallelism(dp=4, cp=2, global_batch=8, tokens=64)
# Round numbers: 10 bytes/s near, 2 far, a second of latency near and three far.
CLUSTER = Cluster(
    name="test",
    peak_flops=1000.0,
    memory_bytes=1e6,
    memory_bandwidth=100.0,
    within_node=10.0,
    between_nodes=2.0,
    within_node_latency=1.0,
    between_nodes_latency=3.0,
    ranks_per_node=4,
    matmul_fraction=0.5,
    collective_efficiency=1.0,
)


def spread(**changes: object) -> Parallelism:
    return dataclasses.replace(SPREAD, **changes)  # type: ignore[arg-type]
