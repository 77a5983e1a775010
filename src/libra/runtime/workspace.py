"""Memory that the calls of one pool use in turn: what is under way, and gradients on their way."""

from __future__ import annotations

import math

import torch


class Space:
    """A flat buffer that is cut from front to back."""

    __slots__ = ("_at", "_flat")

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._at = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of what it gives."""
        return self._flat.dtype

    def take(self, *shape: int) -> torch.Tensor:
        """The next elements, with whatever they hold, as a contiguous tensor of that shape."""
        start, self._at = self._at, self._at + math.prod(shape)
        assert self._at <= len(self._flat), "the workspace is smaller than its plan"
        return piece(self._flat, start, shape)


def piece(flat: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Elements of a flat tensor from `start` on, as a contiguous tensor of that shape: one view."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return flat.as_strided(shape, strides, flat.storage_offset() + start)


class Workspace:
    """Memory that the calls of one pool use in turn, layer after layer, and give back at the end.

    A call waits, in its stream, for all transfers that touch what it took; the next call in that
    stream may begin anew.  Each stream has its own.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.device, int, torch.dtype], torch.Tensor] = {}

    def open(self, device: torch.device, dtype: torch.dtype, elements: int) -> Space:
        """Room for `elements`, which no earlier call of this stream uses any longer."""
        stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        key = device, stream, dtype
        flat = self._flat.get(key)
        if flat is None or len(flat) < elements:
            self._flat.pop(key, None)
            flat = None  # freed first: never hold both
            with torch.inference_mode(False):  # a later call may record gradients
                flat = self._flat[key] = torch.empty(elements, dtype=dtype, device=device)
        return Space(flat)

    def release(self) -> None:
        """Give the memory back; a later call takes it anew."""
        self._flat.clear()

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return sum(flat.nbytes for flat in self._flat.values())
