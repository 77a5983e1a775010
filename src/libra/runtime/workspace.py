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

    A call waits, in its stream, for all transfers that touch what it took, so the next call in that
    stream may begin anew; one that raises does not, and has to `release` it.  Each stream has its
    own.
    """

    def __init__(self) -> None:
        self._bytes: dict[tuple[torch.device, int], torch.Tensor] = {}

    def open(self, device: torch.device, *parts: tuple[torch.dtype, int]) -> list[Space]:
        """Room for so many elements of each dtype, wider dtypes first, which no earlier call of
        this stream uses any longer.
        """
        stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        nbytes = sum(dtype.itemsize * elements for dtype, elements in parts)
        flat = self._bytes.get((device, stream))
        if flat is None or len(flat) < nbytes:
            self._bytes.pop((device, stream), None)
            flat = None  # freed first: never hold both
            with torch.inference_mode(False):  # a later call may record gradients
                flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._bytes[device, stream] = flat
        spaces, start = [], 0
        for dtype, elements in parts:
            stop = start + dtype.itemsize * elements
            spaces.append(Space(flat[start:stop].view(dtype)))
            start = stop
        return spaces

    def release(self) -> None:
        """Let go of the memory, to which transfers that are under way still hold; a later call
        takes it anew.
        """
        self._bytes.clear()

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return sum(flat.nbytes for flat in self._bytes.values())
