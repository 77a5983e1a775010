"""Checks of one rank's q, k and v, made before any tensor moves."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from libra.config import HeadShape, PoolConfig
from libra.plan.plan_pool import cut_pool_heads

# Every layer asks for a shape that is checked already: checking it again costs 5% of its host time.
_checked_shape = functools.cache(HeadShape)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def head_shape(q: Tensor, k: Tensor, v: Tensor) -> HeadShape:
    """Head shape of q [rows, heads, dim], k [rows, kv heads, dim] and v [rows, kv heads, value
    dim].
    """
    # None is the default of `HeadShape`, so equal shapes have equal keys.
    v_dim = None if v.shape[2] == q.shape[2] else v.shape[2]
    return _checked_shape(q.shape[1], k.shape[1], q.shape[2], q.element_size(), v_dim)


def describe(q: Tensor, k: Tensor, v: Tensor) -> dict[str, object]:
    """Facts that must be equal on every rank of a pool."""
    return {
        "dtype": str(q.dtype).removeprefix("torch."),
        "device": q.device.type,
        "heads": f"{q.shape[1]} query / {k.shape[1]} key-value",
        "head dim": f"{q.shape[2]} / {v.shape[2]}",
    }


def find_problem(
    q: Tensor, k: Tensor, v: Tensor, rows: int, tokens: int, config: PoolConfig, cp_size: int
) -> str | None:
    """The first problem of q, k and v for a microbatch that gives this rank `rows` of `tokens`;
    None if there is none.
    """
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3:
        return f"q, k and v must be [tokens on this rank, heads, head dim]; got {shapes}"
    if not q.dtype == k.dtype == v.dtype:
        dtypes = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
        return f"q, k and v must share one dtype; got {dtypes}: cast them before the call"
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} is not supported; use bfloat16, float16, float32 or float64"
    if not q.device == k.device == v.device:
        devices = f"q on {q.device}, k on {k.device}, v on {v.device}"
        return f"q, k and v must be on one device; got {devices}"
    if not q.shape[0] == k.shape[0] == v.shape[0] == rows:
        return (
            f"this rank holds {rows} of the microbatch's {tokens} tokens (CP {cp_size}, "
            f"{config.shard_layout} shards), but got {shapes}: cu_seqlens (with tokens=...) must "
            "sum to the tokens given"
        )
    if k.shape[1] != v.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"key and value heads must be equal and divide the query heads; got {shapes}"
    if q.shape[2] != k.shape[2] or not q.shape[2] or not v.shape[2]:
        return f"q and k must have the same head dim, and none may be 0; got {shapes}"
    # The last checks are those of planning, which would raise on the planner thread.
    try:
        cut_pool_heads(head_shape(q, k, v), config, cp_size)
    except ValueError as error:
        return str(error)
    return None
