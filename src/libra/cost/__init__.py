"""A cost model of training: seconds and bytes of a step, from a description of the machine.

    Cluster ──────────────┬────────────────────────────┐
    kernel table ─────────┤                            │
    plan of a pool ──> AttentionTime ──> seconds ──> step_seconds ──> tokens per second
                          of one layer                 │
    Model, Parallelism ───┬────────────────────────────┘
                          └──> rank_memory ──> bytes of a GPU

The function to call is `step_seconds`; `AttentionTime` makes the attention seconds that it takes.
Clusters and models are presets or come from description files (`describe`).  Every file says at its
top which simplifications it makes.  Units are SI.
"""

from __future__ import annotations

from libra.cost.attention_time import AttentionTime
from libra.cost.description import describe
from libra.cost.hardware import CLUSTERS, Cluster
from libra.cost.kernel_table import KernelTable, read_kernel_table
from libra.cost.memory import rank_memory
from libra.cost.models import MODELS, Model
from libra.cost.parallelism import Parallelism
from libra.cost.published import published_table
from libra.cost.step import StepSeconds, step_seconds

__all__ = [
    "CLUSTERS",
    "MODELS",
    "AttentionTime",
    "Cluster",
    "KernelTable",
    "Model",
    "Parallelism",
    "StepSeconds",
    "describe",
    "published_table",
    "rank_memory",
    "read_kernel_table",
    "step_seconds",
]
