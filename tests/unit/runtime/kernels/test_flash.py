"""FlashAttention kernels on a CPU, against stand-ins for their libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.runtime.kernels import flash
from libra.runtime.kernels.flash import FlashKernel
from libra.runtime.kernels.interface import Buffers, Grads
from libra.runtime.kernels.packed import pack
from tests.unit.runtime.kernels import flash_standins
from tests.unit.runtime.kernels.kernel_cases import (
    CPU,
    SCALE,
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

BUILDS = ("flash2", "flash3 of August 2025", "flash3", "flash4", "varlen")
SHARED = Case(
    segments=make_segments(
        *((4 * i, 4, 2, 12 - i, 2 * (i % 2), i % 2) for i in range(6)), heads=2, kv_heads=1
    ),
    q_shape=(24, 4, 8),
    k_shape=(16, 2, 8),
    v_shape=(16, 2, 8),
)


@contextlib.contextmanager
def standin(build: str) -> Iterator[FlashKernel]:
    """The kernel of `build`, its library replaced."""
    name = build.partition(" ")[0]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if build == "flash2":
            flash_standins.install_flash2(patch)
        elif name == "flash3":
            flash_standins.install_flash3(patch, operator=build == "flash3")
        elif build == "flash4":
            flash_standins.install_flash4(patch)
        else:
            stack.enter_context(flash_standins.varlen_operators(patch))
        yield flash.load(name)


@pytest.mark.parametrize("build", BUILDS)
@settings(max_examples=25)
@given(case=cases(), duplication=st.integers(1, 4))
def test_any_segments_equal_dense_attention(build: str, case: Case, duplication: int) -> None:
    with standin(build) as kernel:
        found = run(replace(kernel, duplication=duplication), case, torch.float16)
    assert_close(found, expected(case, torch.float16), 4e-3)


@pytest.mark.parametrize("build", BUILDS)
def test_samples_that_lie_back_to_back_are_passed_as_views(build: str) -> None:
    case = plain_case([5, 1, 9], heads=4, kv_heads=2, dim=8)
    call = pack(case.segments, CPU, 4).parts[0]
    q, k, _, _ = inputs(case, torch.bfloat16)
    assert call.q.gather(q).data_ptr() == q.data_ptr()
    assert call.k.gather(k).data_ptr() == k.data_ptr()
    with standin(build) as kernel:
        found = run(kernel, case, torch.bfloat16)
    assert_close(found, expected(case, torch.bfloat16), 3e-2)


@pytest.mark.parametrize("build", ["flash3", "flash4"])
def test_head_dims_that_a_build_takes_unequal_are_not_padded(build: str) -> None:
    case = plain_case([3, 2], heads=1, kv_heads=1, dim=192, value_dim=128)
    with standin(build) as kernel:
        q, k, v, dout = inputs(case, torch.float16)
        widths = kernel.widths(Buffers(q, k, v, dout, q))
        found = run(kernel, case, torch.float16)
    assert widths == (192, 128)
    assert_close(found, expected(case, torch.float16), 6e-3)


@pytest.mark.parametrize("build", BUILDS)
def test_a_run_repeats_itself_bit_for_bit(build: str) -> None:
    with standin(build) as kernel:
        first, again = (run(kernel, SHARED, torch.bfloat16) for _ in range(2))
    for name in Result.__slots__:
        assert torch.equal(getattr(first, name), getattr(again, name))


@pytest.mark.parametrize("build", BUILDS)
def test_transposed_and_expanded_views_are_read_as_their_values(build: str) -> None:
    q, k, v, dout = inputs(SHARED, torch.float16)
    views = (
        q.transpose(0, 1).contiguous().transpose(0, 1),
        k.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.cat([v, v], dim=2)[..., ::2],
        dout[:1, :1, :1].expand(dout.shape),
    )
    with standin(build) as kernel:
        found = run(kernel, SHARED, torch.float16, views)
    due = expected(SHARED, torch.float16, tuple(view.contiguous() for view in views))
    assert_close(found, due, 4e-3)


def test_nothing_waits_for_the_device() -> None:
    """On the meta device a tensor has no values: whatever reads one on the host raises."""
    meta = torch.device("meta")

    def attend(q, k, v, **rest):  # type: ignore[no-untyped-def]
        return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[1], len(q)).float()

    def attend_backward(q, k, v, **rest):  # type: ignore[no-untyped-def]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    build = flash.BUILDS["flash4"]
    kernel = FlashKernel(name="meta", build=build, attend=attend, attend_backward=attend_backward)
    for case in (SHARED, plain_case([3, 4], heads=2, kv_heads=1, dim=8)):
        prepared = kernel.prepare(case.segments, meta)
        q, k, v, dout = (t.to(meta) for t in inputs(case, torch.bfloat16))
        lse = torch.empty(case.segments.lse_size, device=meta)
        out, dq = torch.empty_like(dout), torch.empty_like(q)
        dk, dv = torch.empty_like(k).float(), torch.empty_like(v).float()
        buffers = Buffers(q, k, v, out, lse)
        kernel.forward(prepared, buffers, SCALE)
        kernel.backward(prepared, buffers, Grads(dout, dq, dk, dv), SCALE)


@pytest.mark.parametrize("asked", [False, True])
def test_the_library_repeats_itself_when_pytorch_is_asked_to(asked: bool) -> None:
    seen = []
    with standin("flash4") as kernel:
        real = kernel.attend_backward
        kernel = replace(
            kernel,
            attend_backward=lambda **given: (seen.append(given["deterministic"]), real(**given))[1],
        )
        torch.use_deterministic_algorithms(asked)
        try:
            run(kernel, plain_case([4], heads=1, kv_heads=1, dim=8), torch.float16)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [asked]


def test_fp32_is_refused_by_name() -> None:
    with standin("flash2") as kernel, pytest.raises(ValueError, match=r"flash2 .*float32.*cast"):
        run(kernel, SHARED, torch.float32)


def test_heads_wider_than_any_kernel_are_refused() -> None:
    case = plain_case([2], heads=1, kv_heads=1, dim=264)
    with standin("varlen") as kernel, pytest.raises(ValueError, match="264 wide"):
        run(kernel, case, torch.float16)


def test_an_lse_in_another_layout_is_an_error_and_not_a_wrong_gradient() -> None:
    def attend(q, cu_seqlens_q, max_seqlen_q, **rest):  # type: ignore[no-untyped-def]
        return q, q.new_empty(len(cu_seqlens_q) - 1, q.shape[1], max_seqlen_q).float()

    build = flash.BUILDS["flash4"]
    kernel = FlashKernel(name="old", build=build, attend=attend, attend_backward=attend)
    with pytest.raises(RuntimeError, match=r"old returned an LSE of \(2, 1, 4\)"):
        run(kernel, plain_case([4, 2], heads=1, kv_heads=1, dim=8), torch.float16)
