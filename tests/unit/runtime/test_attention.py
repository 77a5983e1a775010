"""The operator on one rank: arguments, dtypes, autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import libra
from tests.reference import block_diagonal_attention

BOUNDS = [0, 3, 8]


@pytest.fixture
def microbatch(mesh: DeviceMesh) -> Iterator[libra.Microbatch]:
    pool = libra.SequencePool(mesh, libra.PoolConfig(pool_size=1, chunks=1))
    yield pool.microbatch(BOUNDS)
    pool.close()


def qkv(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(8, heads, 4, generator=generator, dtype=dtype).requires_grad_()
        for heads in (2, 1, 1)
    ]


@pytest.mark.parametrize("scale", [None, 0.25])
def test_it_equals_the_reference(microbatch: libra.Microbatch, scale: float | None) -> None:
    inputs = qkv()
    out = libra.libra_attention(*inputs, scale=scale, microbatch=microbatch)
    right = block_diagonal_attention(*inputs, BOUNDS, scale)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-12)
    dout = torch.ones_like(out)
    for mine, wanted in zip(
        torch.autograd.grad(out, inputs, dout),
        torch.autograd.grad(right, inputs, dout),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


def test_the_operator_keeps_the_rules_of_operators(microbatch: libra.Microbatch) -> None:
    """Schema, fake kernel and autograd registration, by torch's own check."""
    q, k, v = qkv()
    torch.library.opcheck(
        torch.ops.libra.attention.default,
        (q, k, v, microbatch.serial, 0.5, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"causal": False}, "causal=False"),
        ({"q": None}, "must be torch tensors; got NoneType, Tensor, Tensor"),
        ({"k": torch.empty(8, 1, 4, device="meta")}, "on one device and hold data"),
        ({"microbatch": "x"}, "microbatch is 'x'"),
    ],
)
def test_wrong_arguments_are_refused(
    microbatch: libra.Microbatch, changes: dict[str, Any], part: str
) -> None:
    q, k, v = qkv()
    arguments = {"q": q, "k": k, "v": v, **changes}
    with microbatch, pytest.raises(ValueError, match=part):
        libra.libra_attention(**arguments)


def test_autocast_lowers_what_it_lowers_elsewhere(microbatch: libra.Microbatch) -> None:
    with microbatch, torch.autocast("cpu", dtype=torch.bfloat16):
        assert libra.libra_attention(*qkv(torch.float32)).dtype == torch.bfloat16
        assert libra.libra_attention(*qkv(torch.float64)).dtype == torch.float64


def test_without_gradients_nothing_is_saved(microbatch: libra.Microbatch) -> None:
    q, k, v = (tensor.detach() for tensor in qkv())
    assert libra.libra_attention(q, k, v, microbatch=microbatch).grad_fn is None
    _, lse, peer_out, fetched, stamp = torch.ops.libra.attention(
        q, k, v, microbatch.serial, 0.5, False
    )
    assert [len(each) for each in (lse, peer_out, fetched)] == [0, 0, 0]
    assert stamp[:2].tolist() == [microbatch.serial, 2]
