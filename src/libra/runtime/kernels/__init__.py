"""Attention kernels behind one interface, and the choice among them.  Only a kernel's file knows its library."""

from __future__ import annotations

import importlib

import torch

from libra.runtime.kernels.segments import Kernel

__all__ = ["kernel_for", "kernel_names"]


def kernel_names(device: torch.device) -> tuple[str, ...]:
    """Kernels that could serve `device`, best first.  ValueError for a device that none serves.

    FlashAttention 3 is made for Hopper (9.x) and comes first there; FlashAttention 4 needs 9.x or newer.
    """
    if device.type == "cpu":
        return ("cpu",)
    if device.type != "cuda":
        raise ValueError(
            f"no attention kernel for device {device}; q, k and v must be on cuda or cpu"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"device {device} has compute capability {major}.{minor}; FlashAttention needs 8.0 or newer"
        )
    newer = {8: (), 9: ("flash3", "flash4")}.get(major, ("flash4",))
    return (*newer, "flash2", "varlen")


def kernel_for(device: torch.device, name: str | None = None) -> Kernel:
    """The kernel `name`, or the best one for `device` whose library imports.

    ValueError for a name that does not serve the device, or if nothing imports: it lists what was tried.
    """
    names = kernel_names(device)
    if name is not None and name not in names:
        raise ValueError(
            f"kernel={name!r} does not serve device {device}; choose one of {', '.join(names)}"
        )
    failures = []
    for candidate in names if name is None else (name,):
        try:
            module = importlib.import_module(f"libra.runtime.kernels.{candidate}")
        except (
            ImportError,
            OSError,
            RuntimeError,
        ) as error:  # a broken build fails in its own ways
            failures.append(f"{candidate} ({type(error).__name__}: {error})")
            continue
        kernel: Kernel = module.kernel()
        return kernel
    raise ValueError(
        f"no attention kernel for device {device} imports; tried {'; '.join(failures)}"
    )
