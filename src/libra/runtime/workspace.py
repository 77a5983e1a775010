"""Device memory of attention calls: one workspace that all layers of a pool use in turn.

    workspace of a stream   | accumulators (fp32) | packed rows | returns | ... |
                              Space.take cuts pieces off from front to back

A pool keeps one flat allocation per device and stream, as large as its largest call.  `Operand`
cuts another flat tensor into the rows of each chunk, so that autograd saves one tensor per kind
instead of one per chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from libra.plan.attention_calls import LOCAL


def piece(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Elements of a flat tensor from `start` on, as a contiguous tensor of that shape: one view."""
    strides = [1] * len(shape)  # shape (2, 3, 4) has strides 12, 4, 1
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return flat.as_strided(shape, strides, flat.storage_offset() + start)


@dataclass(slots=True, eq=False)
class Space:
    """A flat buffer from which contiguous tensors are cut, from front to back."""

    flat: Tensor
    taken: int = 0
    """Elements that are cut off already."""

    def take(self, *shape: int) -> Tensor:
        """The next elements as a contiguous tensor of that shape, uninitialised."""
        start, self.taken = self.taken, self.taken + math.prod(shape)
        assert self.taken <= len(self.flat), "the workspace is smaller than its plan"
        return piece(self.flat, start, shape)


class Workspace:
    """Memory that the calls of one pool use in turn, layer after layer, until the pool is closed.

    A call waits, in its stream, for all transfers that touch its memory, so the next call in that
    stream may overwrite all of it.  A call that raises does not wait: it has to `release` the
    workspace.  Each stream has an allocation of its own.
    """

    def __init__(self) -> None:
        self._bytes: dict[tuple[torch.device, int], Tensor] = {}

    def open(self, device: torch.device, *parts: tuple[torch.dtype, int]) -> list[Space]:
        """One space per (dtype, elements), wider dtypes first so that each space is aligned.

        The memory is no longer in use by earlier calls of the current stream.
        """
        stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        sizes = [dtype.itemsize * elements for dtype, elements in parts]
        place, nbytes = (device, stream), sum(sizes)
        if place not in self._bytes or len(self._bytes[place]) < nbytes:
            self._bytes.pop(place, None)  # free the old allocation before making the new one
            with torch.inference_mode(False):  # a later call may record gradients
                self._bytes[place] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # fp32 for 3 elements, then bf16 for 5: bytes [0, 12) and [12, 22).
        flat, spaces, start = self._bytes[place], [], 0
        for (dtype, _), size in zip(parts, sizes, strict=True):
            spaces.append(Space(flat[start : start + size].view(dtype)))
            start += size
        return spaces

    def release(self) -> None:
        """Drop the memory; a later call allocates anew.  Transfers under way keep theirs alive."""
        self._bytes.clear()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(flat.nbytes for flat in self._bytes.values())


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One argument of the attention kernel, wherever its rows lie.

    `operand[LOCAL]` is the worker's own tensor, `operand[chunk]` [R, N, D] the rows that other
    workers sent, or will receive, with that chunk.  Views are cut on access: most calls need few.
    """

    local: Tensor
    flat: Tensor
    """Rows of all chunks, one chunk after the other."""
    starts: tuple[int, ...]
    """Row at which each chunk starts, and the number of rows."""
    heads: int
    """N, heads of one head group."""
    dim: int

    def __getitem__(self, buffer: int) -> Tensor:
        if buffer == LOCAL:
            return self.local
        # Starts (0, 5, 8): chunk 1 has rows [5, 8).
        start, stop = self.starts[buffer : buffer + 2]
        return piece(self.flat, start * self.heads * self.dim, (stop - start, self.heads, self.dim))

    def rows(self, buffer: int) -> Tensor:
        """The same rows as they travel, one head group each: [rows, N * D].

        Example: 8 local heads in groups of 2 make 4 head-group rows per token; heads 4 and 5 of
        token t are row 4 * t + 2.
        """
        return self[buffer].view(-1, self.heads * self.dim)
