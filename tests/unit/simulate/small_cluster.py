"""A small model on four replicas, and windows of eight packs for it."""

from __future__ import annotations

import numpy as np

import libra
from libra.cost import CLUSTERS, Model, Parallelism, published_table
from libra.cost.attention_time import AttentionTime
from libra.data.packing import Packs
from libra.simulate.predict import Setting
from libra.simulate.scaling import select_packs

TOKENS, BATCH, DP, CP = 16_384, 8, 4, 2
MODEL = Model(
    name="small", layers=4, hidden=1024, q_heads=8, kv_heads=8, head_dim=128, ffn=2048, vocab=1000
)
CLUSTER = CLUSTERS["h100"]
SETTING = Setting(
    model=MODEL,
    parallelism=Parallelism(dp=DP, cp=CP, global_batch=BATCH, tokens=TOKENS),
    time=AttentionTime(cluster=CLUSTER, table=published_table(CLUSTER)),
    config=libra.PoolConfig(pool_size=2, block_size=1024),
)


def window(seed: int = 0) -> Packs:
    """Eight packs, one of them a single long sample."""
    source = np.random.default_rng(seed)
    short = source.integers(64, 512, size=2000)
    return libra.pack_sequential(np.insert(short, 0, TOKENS)[:2000], TOKENS)


def first_window(seed: int = 0) -> Packs:
    return select_packs(window(seed), np.arange(BATCH))
