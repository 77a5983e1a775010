"""Both passes of one worker that shares nothing: the pipeline without transfers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import libra
from libra.plan.rank_plan import make_rank_plan
from libra.runtime.device_plan import make_device_plan
from libra.runtime.executor import Executor, Saved
from libra.runtime.kernels.cpu import CpuKernel
from libra.runtime.workspace import Workspace
from tests.reference import block_diagonal_attention

BOUNDS, TOKENS = [0, 5, 16, 24], 32
SCALE = 8**-0.5


@pytest.fixture
def executor(mesh: DeviceMesh) -> Executor:
    """Of one worker with a padded pack, in fp64."""
    return make_executor(8)


def make_executor(element_bytes: int) -> Executor:
    world = dist.group.WORLD
    assert world is not None
    plan = libra.plan_pool(
        [BOUNDS],
        cp_size=1,
        tokens=TOKENS,
        config=libra.PoolConfig(pool_size=1, chunks=2),
        heads=libra.HeadShape(4, 2, 8, element_bytes, 4),
    )
    cpu = torch.device("cpu")
    prepared = make_device_plan(make_rank_plan(plan, 0), plan.heads, CpuKernel(), cpu)
    return Executor(prepared, world, Workspace())


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 8), (2, 8), (2, 4), (4, 4)]
    return [torch.randn(TOKENS, *shape, generator=generator, dtype=dtype) for shape in shapes]


def test_both_passes_equal_the_reference(executor: Executor) -> None:
    q, k, v, dout = tensors()
    saved = executor.forward(q, k, v, SCALE, save_for_backward=True)
    got = [saved.out_TNE, *executor.backward(dout, saved, SCALE)]
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = block_diagonal_attention(*leaves, BOUNDS, SCALE)
    for mine, right in zip(got, [out, *torch.autograd.grad(out, leaves, dout)], strict=True):
        torch.testing.assert_close(mine, right.detach(), rtol=0, atol=1e-12)


def test_padding_is_zero_in_outputs_and_gradients(executor: Executor) -> None:
    q, k, v, dout = tensors()
    saved = executor.forward(q, k, v, SCALE, save_for_backward=True)
    for rows in (saved.out_TNE, *executor.backward(dout, saved, SCALE)):
        assert rows[:24].any(dim=(1, 2)).all()
        assert not rows[24:].any()


def test_without_a_backward_nothing_but_the_output_stays(executor: Executor) -> None:
    q, k, v, _ = tensors()
    saved = executor.forward(q, k, v, SCALE, save_for_backward=False)
    assert [len(rest) for rest in (saved.lse, saved.peer_out, saved.fetched)] == [0, 0, 0]
    with_backward = executor.forward(q, k, v, SCALE, save_for_backward=True)
    assert torch.equal(saved.out_TNE, with_backward.out_TNE)
    assert with_backward.lse.dtype == torch.float64


def test_tensors_need_not_be_contiguous(executor: Executor) -> None:
    q, k, v, dout = tensors()

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)

    saved = executor.forward(q, k, v, SCALE, save_for_backward=True)
    plain = executor.backward(dout, saved, SCALE)
    again = Saved(strided(q), strided(k), strided(v), *saved[3:])
    assert all(map(torch.equal, plain, executor.backward(strided(dout), again, SCALE)))


def test_sums_are_cast_to_the_dtype_of_the_tensors(mesh: DeviceMesh) -> None:
    executor = make_executor(2)
    q, k, v, dout = tensors(torch.bfloat16)
    saved = executor.forward(q, k, v, SCALE, save_for_backward=True)
    assert saved.lse.dtype == torch.float32
    assert {grad.dtype for grad in executor.backward(dout, saved, SCALE)} == {torch.bfloat16}
