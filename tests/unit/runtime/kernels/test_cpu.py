"""The CPU kernel against dense fp64 attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.runtime.kernels.cpu import CpuKernel, cut
from tests.unit.runtime.kernels.kernel_cases import (
    PREFIX,
    Case,
    Result,
    assert_close,
    cases,
    expected,
    inputs,
    make_segments,
    plain_case,
    run,
)

TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 3e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


@settings(max_examples=40)
@given(case=cases(), leaf=st.integers(1, 12))
def test_any_segments_cut_anyhow_equal_dense_attention(case: Case, leaf: int) -> None:
    assert_close(
        run(CpuKernel(leaf=leaf), case, torch.float64), expected(case, torch.float64), 1e-13
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("widen", [False, True], ids=["native", "widened"])
@pytest.mark.parametrize("dims", [(16, 16), (8, 24), (24, 8), (5, 3)], ids=str)
def test_each_dtype_and_head_dim_is_as_exact_as_its_rounding(
    dtype: torch.dtype, widen: bool, dims: tuple[int, int]
) -> None:
    case = replace(
        PREFIX,
        q_shape=(*PREFIX.q_shape[:2], dims[0]),
        k_shape=(*PREFIX.k_shape[:2], dims[0]),
        v_shape=(*PREFIX.v_shape[:2], dims[1]),
    )
    found = run(CpuKernel(leaf=32, widen=widen), case, dtype)
    assert_close(found, expected(case, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("length", [1, 2, 31, 33, 127, 128, 129, 257, 700])
def test_whole_samples_of_any_length_equal_dense_attention(length: int) -> None:
    case = plain_case([length, 1, 3], heads=2, kv_heads=1, dim=8)
    assert_close(run(CpuKernel(), case, torch.float32), expected(case, torch.float32), 5e-6)


def test_segments_that_read_the_same_keys_add_their_gradients() -> None:
    one = (0, 4, 0, 9, 0, 0)
    once = Case(
        segments=make_segments(one, heads=1, kv_heads=1),
        q_shape=(4, 1, 8),
        k_shape=(9, 1, 8),
        v_shape=(9, 1, 8),
    )
    twice = replace(
        once,
        segments=make_segments(one, (4, 4, 0, 9, 0, 0), heads=1, kv_heads=1),
        q_shape=(8, 1, 8),
    )
    q, k, v, dout = inputs(once, torch.float64)
    single = run(CpuKernel(), once, torch.float64, (q, k, v, dout))
    double = run(CpuKernel(), twice, torch.float64, (q.repeat(2, 1, 1), k, v, dout.repeat(2, 1, 1)))
    torch.testing.assert_close(double.dk, 2 * single.dk)
    torch.testing.assert_close(double.dv, 2 * single.dv)


def test_a_run_repeats_itself_bit_for_bit() -> None:
    first, again = (run(CpuKernel(leaf=16), PREFIX, torch.float32) for _ in range(2))
    for name in Result.__slots__:
        assert torch.equal(getattr(first, name), getattr(again, name))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_strided_and_expanded_views_are_read_as_their_values(dtype: torch.dtype) -> None:
    q, k, v, dout = inputs(PREFIX, dtype)
    views = (
        q.transpose(0, 1).contiguous().transpose(0, 1),
        k.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.cat([v, v], dim=2)[..., ::2],
        dout[:1, :1, :1].expand(dout.shape),
    )
    plain = tuple(view.contiguous() for view in views)
    found = run(CpuKernel(), PREFIX, dtype, views)
    due = run(CpuKernel(), PREFIX, dtype, plain)
    for name in Result.__slots__:
        assert torch.equal(getattr(found, name), getattr(due, name))


def test_buffers_may_be_views_into_one_storage() -> None:
    q, k, v, dout = inputs(PREFIX, torch.float64)
    whole = torch.randn(3, *PREFIX.q_shape, dtype=torch.float64)
    whole[1].copy_(q)
    found = run(CpuKernel(leaf=16), PREFIX, torch.float64, (whole[1], k, v, dout))
    assert_close(found, expected(PREFIX, torch.float64, (q, k, v, dout)), 1e-13)


def test_the_kernel_stays_out_of_autograd() -> None:
    q, k, v, dout = inputs(PREFIX, torch.float32)
    found = run(
        CpuKernel(), PREFIX, torch.float32, (q.requires_grad_(), k.requires_grad_(), v, dout)
    )
    assert not found.lse.requires_grad and not found.dk.requires_grad


def test_no_segments_write_nothing() -> None:
    case = replace(PREFIX, segments=make_segments(heads=2, kv_heads=1))
    found = run(CpuKernel(), case, torch.float32)
    assert (found.out == 7).all() and (found.dq == 7).all()
    assert not found.dk.any() and not found.dv.any() and found.lse.numel() == 0


@settings(max_examples=40)
@given(q_len=st.integers(1, 300), prefix=st.integers(0, 50), leaf=st.integers(1, 130))
def test_pieces_cover_each_causal_pair_once_and_no_other_except_above_a_diagonal(
    q_len: int, prefix: int, leaf: int
) -> None:
    seen = torch.zeros(q_len, q_len + prefix, dtype=torch.int64)
    opened = torch.zeros(q_len, dtype=torch.bool)
    for piece in cut(q_len, q_len + prefix, leaf):
        block = torch.ones(piece.rows, piece.keys, dtype=torch.int64)
        rows = slice(piece.row, piece.row + piece.rows)
        seen[rows, piece.key : piece.key + piece.keys] += block.tril() if piece.causal else block
        assert not piece.causal or piece.rows == piece.keys <= max(leaf, 1)
        assert bool(opened[rows].all()) != piece.opens and bool(opened[rows].any()) != piece.opens
        opened[rows] = True
    assert torch.equal(seen, torch.ones_like(seen).tril(prefix))


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cannot serve device meta"):
        CpuKernel().prepare(PREFIX.segments, torch.device("meta"))
