"""Small cases that are easy to get wrong, each with its right value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import libra
from tests.distributed.cases import Case, make_pack, make_pool, my_rows, reference
from tests.distributed.ranks import RankPool
from tests.distributed.test_attention import check
from tests.reference import block_diagonal_attention

LIBRA = libra.PoolConfig(pool_size=1, block_size=3, chunks=2)
ULYSSES = LIBRA.replace(placement="ulysses", chunks=1)


@pytest.mark.parametrize("shard_layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("config", [LIBRA, LIBRA.replace(placement="paper"), ULYSSES])
def test_a_sample_of_odd_length_is_cut_over_two_ranks(
    ranks2: RankPool, config: libra.PoolConfig, shard_layout: Any
) -> None:
    config = config.replace(shard_layout=shard_layout)
    check(ranks2, Case(bounds=[[0, 7]], tokens=7, cp=2, config=config))
    check(ranks2, Case(bounds=[[0, 7, 14, 15]], tokens=15, cp=2, config=config))


def test_samples_and_blocks_of_one_row(ranks2: RankPool) -> None:
    config = LIBRA.replace(block_size=1, pool_size=2)
    check(ranks2, Case(bounds=[list(range(12)), [0, 11]], tokens=11, config=config))


def test_fewer_tokens_than_ranks(ranks4: RankPool) -> None:
    check(ranks4, Case(bounds=[[0, 1, 3]], tokens=3, cp=4, config=LIBRA))


def test_samples_without_tokens_are_dropped(ranks2: RankPool) -> None:
    config = LIBRA.replace(pool_size=2)
    case = Case(bounds=[[0, 0, 5, 5, 16, 16], [0, 16, 16]], tokens=16, config=config)
    without = Case(bounds=[[0, 5, 16], [0, 16]], tokens=16, config=config)
    assert check(ranks2, case) == check(ranks2, without)


def test_a_pack_of_padding_gets_zeros_and_its_rank_helps(ranks2: RankPool) -> None:
    case = Case(bounds=[[0, 32], [0]], tokens=32, config=LIBRA.replace(pool_size=2))
    load = check(ranks2, case)
    assert min(load) > 0
    assert all(ranks2.run(zeros_on_padding, case))


def zeros_on_padding(rank: int, world_size: int, case: Case) -> bool:
    pool = make_pool(world_size, case.cp, case.config)
    q, k, v, dout = make_pack(case, rank)
    with pool.microbatch(case.bounds[rank], tokens=case.tokens):
        out = libra.libra_attention(q.requires_grad_(), k, v)
        out.backward(dout)
    pool.close()
    assert q.grad is not None
    return rank == 0 or not (out.any() or q.grad.any())


def test_a_rank_without_any_work_takes_part(ranks2: RankPool) -> None:
    config = libra.PoolConfig(pool_size=2, chunks=2, placement="paper", tolerance=9.0)
    load = check(ranks2, Case(bounds=[[0, 32], [0]], tokens=32, config=config))
    assert load == [32 * 33 // 2 * 4, 0]
    assert check(ranks2, Case(bounds=[[0], [0]], tokens=32, config=config)) == [0, 0]


@pytest.mark.parametrize("chunks", [1, 3])
def test_query_groups_are_not_torn(ranks2: RankPool, chunks: int) -> None:
    """6 query heads over 3 key/value heads, in 2 shards of 3 query heads: the second key/value head
    serves both shards.
    """
    config = LIBRA.replace(pool_size=2, head_shards=2, chunks=chunks, placement="paper")
    check(ranks2, Case(bounds=[[0, 32], [0, 32]], tokens=32, heads=(6, 3, 8, 8), config=config))
    config = config.replace(placement="ulysses", pool_size=1)
    check(ranks2, Case(bounds=[[0, 32]], tokens=32, cp=2, heads=(6, 3, 8, 8), config=config))


@pytest.mark.parametrize("config", [LIBRA, LIBRA.replace(head_shards=20), ULYSSES])
def test_forty_query_heads_over_eight_on_four_ranks(
    ranks4: RankPool, config: libra.PoolConfig
) -> None:
    check(ranks4, Case(bounds=[[0, 21, 24]], tokens=24, cp=4, heads=(40, 8, 4, 4), config=config))


def test_ulysses_refuses_heads_that_do_not_divide_and_says_what_would(ranks4: RankPool) -> None:
    case = Case(bounds=[[0, 24]], tokens=24, cp=4, heads=(6, 3, 8, 8), config=ULYSSES)
    for error in ranks4.run(plain_call, case, timeout=20, expect_error=True):
        assert error.startswith("ValueError: workers 0, 1, 2, 3: Ulysses needs query heads that")
        assert "6 query heads (3 key/value) at CP 4" in error and "Libra placement" in error
    check(ranks4, Case(bounds=[[0, 24]], tokens=24, cp=4, heads=(6, 3, 8, 8), config=LIBRA))


def plain_call(rank: int, world_size: int, case: Case) -> torch.Tensor:
    pool = make_pool(world_size, case.cp, case.config)
    q, k, v = (tensor[my_rows(case, rank % case.cp)] for tensor in make_pack(case, 0)[:3])
    with pool.microbatch(case.bounds[rank // case.cp], tokens=case.tokens):
        return libra.libra_attention(q, k, v)


@pytest.mark.parametrize("dims", [(8, 4), (4, 8), (1, 3)])
def test_values_may_be_narrower_or_wider_than_keys(ranks2: RankPool, dims: tuple[int, int]) -> None:
    config = LIBRA.replace(pool_size=2)
    check(ranks2, Case(bounds=[[0, 32], [0, 9]], tokens=32, heads=(4, 2, *dims), config=config))


@pytest.mark.parametrize("view", ["head-major", "fused", "every other row", "expanded gradient"])
@pytest.mark.parametrize("backward", ["retain", "refetch"])
def test_views_give_the_right_gradients(ranks2: RankPool, view: str, backward: str) -> None:
    config = LIBRA.replace(pool_size=2, backward=backward, chunks=4)
    case = Case(bounds=[[0, 30], [0, 4, 30]], tokens=30, heads=(4, 4, 8, 8), config=config)
    assert max(ranks2.run(error_of_views, case, view)) < 1e-12


def error_of_views(rank: int, world_size: int, case: Case, view: str) -> float:
    """Largest error of out and of the gradients of what q, k and v are views of."""
    pool = make_pool(world_size, 1, case.config)
    *qkv, dout = make_pack(case, rank)
    if view == "head-major":
        leaves = [tensor.transpose(0, 1).contiguous().requires_grad_() for tensor in qkv]
        q, k, v = (leaf.transpose(0, 1) for leaf in leaves)
    elif view == "fused":
        leaves = [torch.stack(qkv, 1).requires_grad_()]
        q, k, v = leaves[0].unbind(1)
    elif view == "every other row":
        leaves = [tensor.repeat_interleave(2, 0).requires_grad_() for tensor in qkv]
        q, k, v = (leaf[::2] for leaf in leaves)
    else:
        leaves = [tensor.requires_grad_() for tensor in qkv]
        q, k, v = leaves
        dout = torch.ones(1, 1, 1, dtype=dout.dtype).expand_as(dout)
    with pool.microbatch(case.bounds[rank], tokens=case.tokens):
        out = libra.libra_attention(q, k, v)
        got = [out, *torch.autograd.grad(out, leaves, dout)]
    pool.close()
    right = block_diagonal_attention(q, k, v, case.bounds[rank])
    wanted = [right, *torch.autograd.grad(right, leaves, dout)]
    return max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_is_what_it_is_for_other_attention(ranks2: RankPool, dtype: torch.dtype) -> None:
    config = LIBRA.replace(pool_size=2)
    case = Case(bounds=[[0, 30], [0, 4, 30]], tokens=30, dtype=dtype, config=config)
    kept = dtype == torch.float64
    for out_dtype, grad_dtype, error in ranks2.run(autocast_call, case):
        assert out_dtype == (torch.float64 if kept else torch.bfloat16)
        assert grad_dtype == dtype
        assert error < (1e-12 if kept else 0.06)


def autocast_call(
    rank: int, world_size: int, case: Case
) -> tuple[torch.dtype, torch.dtype | None, float]:
    pool = make_pool(world_size, 1, case.config)
    q, k, v, dout = make_pack(case, rank)
    with pool.microbatch(case.bounds[rank]), torch.autocast("cpu", torch.bfloat16):
        out = libra.libra_attention(q.requires_grad_(), k, v)
    out.backward(dout.to(out.dtype))
    pool.close()
    assert q.grad is not None
    right, dq, *_ = reference(case, rank)
    error = max(float((out - right).abs().max()), float((q.grad - dq).abs().max()))
    return out.dtype, q.grad.dtype, error


@pytest.mark.parametrize("backward", ["retain", "refetch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_repeats_itself_bit_for_bit(
    ranks4: RankPool, backward: str, dtype: torch.dtype
) -> None:
    config = LIBRA.replace(pool_size=2, backward=backward, block_size=5)
    bounds = [[0, 61], [0, 20, 61]]
    case = Case(bounds=bounds, tokens=61, cp=2, dtype=dtype, config=config)
    assert all(ranks4.run(repeats_itself, case))


def repeats_itself(rank: int, world_size: int, case: Case) -> bool:
    pool = make_pool(world_size, case.cp, case.config)
    replica, cp_rank = divmod(rank, case.cp)
    *qkv, dout = (tensor[my_rows(case, cp_rank)] for tensor in make_pack(case, replica))
    qkv = [tensor.requires_grad_() for tensor in qkv]
    results = []
    for _ in range(3):
        with pool.microbatch(case.bounds[replica], tokens=case.tokens):
            out = libra.libra_attention(*qkv)
            results.append([out, *torch.autograd.grad(out, qkv, dout)])
    pool.close()
    return all(
        torch.equal(a, b) for later in results[1:] for a, b in zip(results[0], later, strict=True)
    )


def test_evaluation_keeps_nothing_for_a_backward(ranks2: RankPool) -> None:
    case = Case(
        bounds=[[0, 32], [0]], tokens=32, dtype=torch.float32, config=LIBRA.replace(pool_size=2)
    )
    assert all(ranks2.run(evaluation, case))


def evaluation(rank: int, world_size: int, case: Case) -> bool:
    """Without gradients the operator returns its output alone; with them also what backward
    reads.
    """
    pool = make_pool(world_size, 1, case.config)
    q, k, v, _ = make_pack(case, rank)
    with pool.microbatch(case.bounds[rank], tokens=case.tokens):
        plain, *kept = torch.ops.libra.attention(q, k, v, 0, 0.5, False)[:4]
        trained, *for_backward = torch.ops.libra.attention(q, k, v, 0, 0.5, True)[:4]
        evaluated = libra.libra_attention(q, k, v, scale=0.5)
        with torch.no_grad():
            also = libra.libra_attention(q.requires_grad_(), k, v, scale=0.5)
    pool.close()
    assert sum(tensor.numel() for tensor in kept) == 0
    assert sum(tensor.numel() for tensor in for_backward) > 0
    assert not evaluated.requires_grad and not also.requires_grad
    return all(torch.equal(plain, other) for other in (trained, evaluated, also))
