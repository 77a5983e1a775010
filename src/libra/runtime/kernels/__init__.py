"""Attention kernels behind one interface, and the choice among them.

    AttentionCall --prepare--> index maps, once per plan
    index maps + Buffers(q, k, v, out, lse)     --forward-->  rows of out and lse
    index maps + Buffers + Grads(dout, dq, ..)  --backward--> rows of dq, sums in dk and dv

Call `kernel_for(device)` for the best kernel that works here.  A kernel's library is imported only
when the kernel is asked for.
"""

from __future__ import annotations

import torch

from libra.runtime.kernels import flash
from libra.runtime.kernels.cpu import CpuKernel
from libra.runtime.kernels.interface import Kernel

__all__ = ["kernel_for", "kernel_names"]


def kernel_names(device: torch.device) -> tuple[str, ...]:
    """Kernels that could serve `device`, best first.  ValueError for a device that none serves.

    FlashAttention 3 is for Hopper (9.x), 4 for 9.x and newer, 2 for all from 8.0.
    """
    if device.type == "cpu":
        return ("cpu",)
    if device.type != "cuda":
        raise ValueError(f"no attention kernel for device {device}: move q, k and v to cuda or cpu")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"device {device} has compute capability {major}.{minor}; FlashAttention needs 8.0"
        )
    newest = ("flash4", "flash2", "varlen")
    return {8: ("flash2", "varlen"), 9: ("flash3", *newest)}.get(major, newest)


def kernel_for(device: torch.device, name: str | Kernel | None = None) -> Kernel:
    """The kernel `name`, or the best one for `device` whose library imports; a kernel is itself.

    Raises ValueError if `name` does not serve the device, or if no library imports; the error lists
    the kernels that were tried.
    """
    if name is not None and not isinstance(name, str):
        return name
    names = kernel_names(device)
    if name is not None and name not in names:
        raise ValueError(
            f"kernel={name!r} does not serve device {device}; choose one of {', '.join(names)}"
        )
    failures: list[str] = []
    for candidate in names if name is None else (name,):
        try:
            return CpuKernel() if candidate == "cpu" else flash.load(candidate)
        # A broken build fails in many ways.
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            failures.append(f"{candidate} ({type(error).__name__}: {error})")
    raise ValueError(
        f"no attention kernel for device {device} is usable; tried {'; '.join(failures)}"
    )
