"""The choice of a kernel: by device, by name, and by the libraries that import."""

from __future__ import annotations

import sys

import pytest
import torch

from libra.runtime.kernels import kernel_for, kernel_names
from libra.runtime.kernels.flash import FlashKernel
from tests.unit.runtime.kernels import flash_standins

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def gpu(patch: pytest.MonkeyPatch, major: int, minor: int = 0) -> None:
    """Pretend that `CUDA` has this compute capability."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))


@pytest.mark.parametrize(
    "major, names",
    [
        (8, ("flash2", "varlen")),
        (9, ("flash3", "flash4", "flash2", "varlen")),
        (10, ("flash4", "flash2", "varlen")),
        (12, ("flash4", "flash2", "varlen")),
    ],
)
def test_kernels_are_tried_in_the_order_that_suits_the_gpu(
    major: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, major)
    assert kernel_names(CUDA) == names


def test_the_best_kernel_whose_library_imports_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 9)
    flash_standins.install_flash2(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # type: ignore[arg-type]
    kernel = kernel_for(CUDA)
    assert isinstance(kernel, FlashKernel) and kernel.name == "flash2"


def test_a_library_too_old_is_passed_over_and_the_error_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, 8)
    flash_standins.install_flash2(monkeypatch, version="2.5.9.post1")
    with pytest.raises(ValueError, match=r"flash2 \(ImportError: flash_attn is 2\.5\.9\.post1"):
        kernel_for(CUDA, "flash2")


def test_when_nothing_imports_the_error_lists_what_was_tried_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, 9)
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(ValueError, match=r"flash3.*flash4.*flash2.*varlen.*without FlashAttention"):
        kernel_for(CUDA)


def test_a_kernel_of_another_device_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"kernel='flash2' does not serve device cpu.*cpu"):
        kernel_for(CPU, "flash2")


def test_a_device_or_gpu_without_a_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device meta"):
        kernel_for(torch.device("meta"))
    gpu(monkeypatch, 7, 5)
    with pytest.raises(ValueError, match=r"compute capability 7\.5"):
        kernel_for(CUDA)
