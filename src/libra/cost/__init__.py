"""A cost model of training: machines, models, attention kernels and what a step of them takes.

Start from `step.py`, which says where ranks wait for each other; every file says at its top what
it simplifies.  Units are SI.
"""

from __future__ import annotations

from libra.cost.attention_time import AttentionTime, attend_seconds
from libra.cost.description import Description, describe, preset, read_description
from libra.cost.hardware import CLUSTERS, Cluster
from libra.cost.kernel_table import KernelTable
from libra.cost.memory import RankMemory, rank_memory
from libra.cost.microbatch import MicrobatchSeconds, microbatch_seconds
from libra.cost.models import MODELS, Model
from libra.cost.parallelism import Parallelism
from libra.cost.published import cluster_table, published_table
from libra.cost.step import StepSeconds, step_schedule, step_seconds
from libra.cost.table_file import read_kernel_table, write_kernel_table

__all__ = [
    "CLUSTERS",
    "MODELS",
    "AttentionTime",
    "Cluster",
    "Description",
    "KernelTable",
    "MicrobatchSeconds",
    "Model",
    "Parallelism",
    "RankMemory",
    "StepSeconds",
    "attend_seconds",
    "cluster_table",
    "describe",
    "microbatch_seconds",
    "preset",
    "published_table",
    "rank_memory",
    "read_description",
    "read_kernel_table",
    "step_schedule",
    "step_seconds",
    "write_kernel_table",
]
