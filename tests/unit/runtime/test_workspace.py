"""Memory that calls use in turn: grown where a plan needs more, given back at the end."""

from __future__ import annotations

import pytest
import torch

from libra.runtime.workspace import Workspace

CPU = torch.device("cpu")


def test_pieces_lie_one_behind_the_other() -> None:
    (space,) = Workspace().open(CPU, (torch.float32, 10))
    first, second = space.take(2, 3), space.take(4)
    assert (first.shape, second.shape) == ((2, 3), (4,))
    assert first.is_contiguous()
    assert second.data_ptr() == first.data_ptr() + 6 * 4


def test_no_more_is_taken_than_was_asked_for() -> None:
    (space,) = Workspace().open(CPU, (torch.float32, 10))
    space.take(10)
    with pytest.raises(AssertionError, match="smaller than its plan"):
        space.take(1)


def test_the_next_call_finds_the_same_memory() -> None:
    workspace = Workspace()
    (before,) = workspace.open(CPU, (torch.bfloat16, 100))
    (after,) = workspace.open(CPU, (torch.float32, 50))
    assert before.take(1).data_ptr() == after.take(1).data_ptr()
    assert workspace.nbytes == 200


def test_sums_lie_before_what_is_narrower() -> None:
    exact, space = Workspace().open(CPU, (torch.float32, 3), (torch.bfloat16, 5))
    assert space.take(5).data_ptr() == exact.take(3).data_ptr() + 3 * 4
    assert (exact.flat.dtype, space.flat.dtype) == (torch.float32, torch.bfloat16)


def test_it_grows_to_the_largest_call_whatever_its_dtypes() -> None:
    workspace = Workspace()
    workspace.open(CPU, (torch.float32, 8), (torch.bfloat16, 2))
    workspace.open(CPU, (torch.float32, 2), (torch.bfloat16, 12))
    workspace.open(CPU, (torch.bfloat16, 17))
    assert workspace.nbytes == 36
    workspace.release()
    assert workspace.nbytes == 0


def test_what_an_inference_call_took_serves_training() -> None:
    workspace = Workspace()
    with torch.inference_mode():
        workspace.open(CPU, (torch.float32, 4))
    (space,) = workspace.open(CPU, (torch.float32, 4))
    piece = space.take(4)
    assert not piece.is_inference()
    (piece * torch.ones(4, requires_grad=True)).sum().backward()
