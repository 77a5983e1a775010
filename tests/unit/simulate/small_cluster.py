"""Small models on few replicas, and windows of packs for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import libra
from libra.config import PoolConfig
from libra.cost import CLUSTERS, Model, Parallelism, published_table
from libra.cost.attention_time import AttentionTime
from libra.data.packing import Packs
from libra.simulate.compare import select_packs
from libra.simulate.predict import Setting
from libra.simulate.results import Candidate

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


# Windows of sixteen packs, for replays.
_LENGTHS = np.random.default_rng(0).lognormal(5.5, 1.3, 700).astype(np.int64) + 1
REPLAYED: Packs = libra.pack_best_fit(_LENGTHS, 4096, longer="drop")
CANDIDATES = (Candidate(2, 256, 1), Candidate(4, 256, 2))


def cut(packs: Packs, global_batch: int) -> list[Packs]:
    """Whole windows of a packed corpus."""
    last = len(packs) - global_batch
    return [
        select_packs(packs, np.arange(first, first + global_batch))
        for first in range(0, last + 1, global_batch)
    ]


WINDOWS = cut(REPLAYED, 16)


def make_setting(
    config: PoolConfig | None = None,
    *,
    heads: tuple[int, int, int] = (8, 2, 16),
    tokens: int = 4096,
    global_batch: int = 16,
    dp: int = 16,
    cp: int = 2,
) -> Setting:
    """A setting for replays; `heads` are query heads, key/value heads, and elements of a head."""
    q_heads, kv_heads, head_dim = heads
    table = published_table(CLUSTER, key_dim=head_dim, value_dim=head_dim)
    return Setting(
        model=replace(MODEL, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim),
        parallelism=Parallelism(dp=dp, cp=cp, global_batch=global_batch, tokens=tokens),
        time=AttentionTime(cluster=CLUSTER, table=table),
        config=config or PoolConfig(),
    )
