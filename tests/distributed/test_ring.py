"""Ring attention equals the reference, outputs and gradients, and moves what it must only."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

import libra
from libra.baselines.ring import RingMicrobatch, ring_attention
from libra.runtime.kernels import flash
from tests.distributed.cases import Case, Errors, compare, make_mesh, make_pack, my_rows
from tests.distributed.ranks import RankPool
from tests.distributed.test_attention import TOLERANCE, draw_bounds
from tests.distributed.threads import threaded_ranks
from tests.unit.runtime.kernels.flash_standins import install_flash2


def ring_case(rank: int, world_size: int, case: Case) -> Errors:
    """Forward and backward of every replica's ring."""
    group = make_mesh(world_size, case.cp).get_group("cp")
    replica, cp_rank = rank // case.cp, rank % case.cp
    rows = my_rows(case, cp_rank)
    *qkv, dout = (tensor[rows] for tensor in make_pack(case, replica))
    qkv = [tensor.requires_grad_() for tensor in qkv]
    microbatch = RingMicrobatch(
        case.bounds[replica],
        group,
        tokens=case.tokens,
        shard_layout=case.config.shard_layout,
    )
    out = ring_attention(*qkv, microbatch=microbatch)
    gradients = torch.autograd.grad(out, qkv, dout)
    return compare(case, replica, cp_rank, [out.detach(), *gradients], [])


def check(ranks: RankPool, case: Case) -> None:
    errors = ranks.run(ring_case, case, timeout=30.0)
    assert max(e.worst for e in errors) <= TOLERANCE[case.dtype], errors


@st.composite
def cases(draw: st.DrawFn, world: int) -> Case:
    cp = draw(st.sampled_from([c for c in (1, 2, 4) if c <= world]))
    tokens = draw(st.sampled_from([3, 24, 32, 37, 64]))
    kv, group = (draw(st.sampled_from([1, 2, 3])) for _ in range(2))
    data = draw(st.data())
    return Case(
        bounds=[
            draw_bounds(data, tokens) if tokens > 4 else [0, tokens] for _ in range(world // cp)
        ],
        tokens=tokens,
        cp=cp,
        heads=(kv * group, kv, *draw(st.sampled_from([(4, 4), (8, 4), (4, 8)]))),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
        config=libra.PoolConfig(shard_layout=draw(st.sampled_from(["contiguous", "zigzag"]))),
    )


@settings(max_examples=60, deadline=None)
@given(case=cases(2))
def test_a_ring_of_two_equals_the_reference(ranks2: RankPool, case: Case) -> None:
    check(ranks2, case)


@settings(max_examples=60, deadline=None)
@given(case=cases(4))
def test_rings_on_four_ranks_equal_the_reference(ranks4: RankPool, case: Case) -> None:
    check(ranks4, case)


def moved_case(rank: int, world_size: int, bounds: list[int]) -> int:
    """Bytes that this rank hands to the network, forward and backward."""
    sent = 0
    all_to_all = dist.all_to_all_single

    def count(into: torch.Tensor, rows: torch.Tensor, *splits: list[int], **options: object):  # type: ignore[no-untyped-def]
        nonlocal sent
        assert splits[1][rank] == 0, "a rank sends itself rows"
        sent += rows.nbytes
        return all_to_all(into, rows, *splits, **options)

    group = make_mesh(world_size, world_size).get_group("cp")
    microbatch = RingMicrobatch(bounds, group)
    rows = microbatch.steps.rows
    q, k, v = (torch.randn(rows, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    dist.all_to_all_single = count
    try:
        ring_attention(q, k, v, microbatch=microbatch).sum().backward()
    finally:
        dist.all_to_all_single = all_to_all
    return sent


def test_nothing_moves_where_no_sample_crosses_ranks(ranks4: RankPool) -> None:
    assert ranks4.run(moved_case, list(range(0, 65, 8))) == [0, 0, 0, 0]


def test_one_long_sample_sends_every_block_round_the_ring(ranks4: RankPool) -> None:
    row = 2 * 4 * 8  # keys and values, dim, bytes
    # 16 rows a block, but no other rank reads the pack's last 8, which rank 0 holds; three hops of
    # keys and values in each pass, and three of gradients: two on, one home.
    assert sum(ranks4.run(moved_case, [0, 64])) == 9 * (3 * 16 + 8) * row


def test_only_rows_that_another_rank_reads_travel(ranks2: RankPool) -> None:
    # zigzag over 2 ranks: 0 0 0 0 | 1 1 1 1 1 1 1 1 | 0 0 0 0; one sample crosses at 4, by 2 rows
    sent = ranks2.run(moved_case, [0, 2, 8, 16])
    row = 2 * 4 * 8
    # rank 0's rows 2, 3 and, of the sample at 8, rank 1's last 4; each forward, backward, and home
    assert sent == [(2 * 2 + 4) * row, (2 * 4 + 2) * row]


def test_tensors_that_do_not_fit_are_refused_by_name(ranks2: RankPool) -> None:
    microbatch = RingMicrobatch([0, 8], None)
    q = torch.zeros(7, 2, 4)
    with pytest.raises(ValueError, match="this rank holds 8 of the microbatch's 8 tokens"):
        ring_attention(q, q, q, microbatch=microbatch)


@pytest.mark.parametrize("world", [2, 4])
def test_a_ring_of_a_flash_attention_build_equals_the_reference(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_flash2(monkeypatch)
    kernel = flash.load("flash2")
    case = Case(
        bounds=[[0, 7, 41, 44, 60]],
        tokens=64,
        cp=world,
        heads=(4, 2, 8, 8),
        dtype=torch.bfloat16,
        config=libra.PoolConfig(shard_layout="zigzag"),
    )

    def one_ring(rank: int, world_size: int) -> Errors:
        rows = my_rows(case, rank)
        *qkv, dout = (tensor[rows] for tensor in make_pack(case, 0))
        qkv = [tensor.requires_grad_() for tensor in qkv]
        microbatch = RingMicrobatch(
            case.bounds[0], dist.group.WORLD, tokens=case.tokens, kernel=kernel
        )
        out = ring_attention(*qkv, microbatch=microbatch)
        gradients = torch.autograd.grad(out, qkv, dout)
        return compare(case, 0, rank, [out.detach(), *gradients], [])

    errors = threaded_ranks(world, one_ring)
    assert max(each.worst for each in errors) <= TOLERANCE[torch.bfloat16], errors
