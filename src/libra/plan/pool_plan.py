"""PoolPlan: everything that a pool's workers need to know about its attention, and the flat buffer
in which a plan travels.

    cu_seqlens, assignment  -->  geometry      where samples and blocks lie
                            -->  kv_fetches    K and V rows that each worker needs
                            -->  kv_transfers  runs of rows that bring them
                            -->  moved_rows    rows of every kind, chunk and pair of workers

Only the lengths, cuts, assignment and speeds travel; each worker derives the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.data.lengths import IntArray
from libra.plan.geometry import Geometry, pool_geometry, scatter_add, with_cuts
from libra.plan.head_groups import HeadGroups, cut_heads
from libra.plan.kv_fetch import (
    KVBufferRows,
    KVFetches,
    KVTransfers,
    kv_buffer_rows,
    kv_transfers,
    pool_kv_fetches,
)
from libra.plan.kv_multicast import multicast_runs, relieves

_MAGIC: Final = int.from_bytes(b"LIBRAPLN", "little")
_VERSION: Final = 3
_CHECKSUM_BYTES: Final = 8


@dataclass(frozen=True, eq=False)
class PoolPlan:
    """Which worker computes which tile of a pool, and what travels for it.

    Tile ID = block * H + head shard, with blocks counted through the pool: (pack * blocks + block)
    * H + shard.
    """

    geometry: Geometry
    """Samples, fragments and blocks of the pool."""
    config: PoolConfig
    heads: HeadShape
    shards: int
    """Head shards of a block, H in force."""
    assignment: NDArray[np.int32]
    """Worker of each tile, [blocks * H]."""
    speeds: IntArray | None = None
    """Speed of each worker in thousandths of their mean, [workers]; None where all are equal."""

    @property
    def cu_seqlens(self) -> tuple[IntArray, ...]:
        """Sample bounds of each pack, zero-length samples dropped."""
        return self.geometry.cu_seqlens

    @property
    def tokens(self) -> int:
        """L, padding included."""
        return self.geometry.tokens

    @property
    def cp_size(self) -> int:
        """Workers that share a pack."""
        return self.geometry.cp_size

    @property
    def workers(self) -> int:
        """W = P * CP."""
        return self.geometry.workers

    @property
    def tile_home(self) -> IntArray:
        """Worker that holds the Q rows of each tile, int64 [blocks * H]."""
        return np.repeat(self.geometry.block_worker, self.shards)

    @property
    def tile_rows(self) -> IntArray:
        """Q rows of each tile, int64 [blocks * H]."""
        return np.repeat(self.geometry.block_stop - self.geometry.block_start, self.shards)

    @cached_property
    def head_groups(self) -> HeadGroups:
        """How heads are cut."""
        return cut_heads(self.heads, self.shards, self.config.chunks)

    @cached_property
    def kv_fetches(self) -> KVFetches:
        """K and V rows that each worker needs; `paper` fetches complete samples."""
        whole = self.config.placement == "paper"
        return pool_kv_fetches(
            self.geometry, self.assignment, self.head_groups, complete_groups=whole
        )

    @cached_property
    def kv_transfers(self) -> KVTransfers:
        """Runs of rows that bring the KV fetches; `surplus` sends them by multicast where that
        relieves the busiest sender.
        """
        direct = kv_transfers(self.geometry, self.kv_fetches)
        if self.config.placement != "surplus":
            return direct
        per_node = self.config.ranks_per_node
        multicast = multicast_runs(direct, self.kv_fetches, workers=self.workers, per_node=per_node)
        if multicast is direct:
            return direct
        # Compare with all that workers send, Q and O included.
        before, after = (
            self._traffic(self._moved_rows(runs)).sum(axis=0) for runs in (direct, multicast)
        )
        return multicast if relieves(before, after, per_node) else direct

    @cached_property
    def kv_buffer_rows(self) -> KVBufferRows:
        """Where K and V lie at the workers that fetch them."""
        return kv_buffer_rows(self.kv_transfers, self.kv_fetches, self.workers)

    @cached_property
    def moved_rows(self) -> IntArray:
        """Rows of head groups from worker i to worker j, int64 [3, chunks, workers, workers]: Q
        from its home, K and V from their holders, K and V that are passed on.

        Everything that is counted in bytes follows from this table: O, and gradients in backward,
        travel the same rows back.
        """
        return self._moved_rows(self.kv_transfers)

    def _moved_rows(self, runs: KVTransfers) -> IntArray:
        workers, chunks = self.workers, self.head_groups.chunks
        home, rows = self.tile_home, self.tile_rows * self.head_groups.per_chunk
        away = np.flatnonzero(home != self.assignment)
        # Every chunk moves the same rows of Q, as every tile has the same heads in each chunk.
        q = scatter_add((workers, workers), (home[away], self.assignment[away]), rows[away])
        per_chunk = np.broadcast_to(q, (1, chunks, workers, workers))
        return np.concatenate([per_chunk, runs.rows(workers, chunks)])

    @cached_property
    def load(self) -> IntArray:
        """Causal query-key pairs times heads of each worker, int64 [workers]."""
        cost = np.repeat(self.geometry.block_pairs * (self.heads.q // self.shards), self.shards)
        return scatter_add((self.workers,), self.assignment, cost)

    @property
    def home_load(self) -> IntArray:
        """Load of each worker if nothing moved, int64 [workers]."""
        cost = self.geometry.block_pairs * self.heads.q
        return scatter_add((self.workers,), self.geometry.block_worker, cost)

    @property
    def imbalance(self) -> float:
        """max/mean - 1 of `load`, each over its worker's speed; 0 for a pool of padding only."""
        if not self.load.any():
            return 0.0
        speeds = np.ones(self.workers) if self.speeds is None else self.speeds
        return float((self.load / speeds).max() / (self.load.sum() / speeds.sum()) - 1)

    @cached_property
    def traffic(self) -> IntArray:
        """Forward bytes from worker i to worker j: int64 [3, workers, workers] for Q, K with V, and
        O.
        """
        return self._traffic(self.moved_rows)

    def _traffic(self, moved_rows: IntArray) -> IntArray:
        heads, head_groups = self.heads, self.head_groups
        q, kv, passed_on = moved_rows.sum(axis=1)
        kv_bytes = (kv + passed_on) * heads.kv_bytes(head_groups.kv_heads)
        q_row, o_row = heads.q_bytes(head_groups.heads), heads.o_bytes(head_groups.heads)
        return np.stack([q * q_row, kv_bytes, q.T * o_row])

    @property
    def backward_traffic(self) -> IntArray:
        """Backward bytes from worker i to worker j: int64 [5, workers, workers] for dO, Q and K
        with V where they are fetched again, dQ, and dK with dV.
        """
        q, kv, o = self.traffic
        again = self.config.backward == "refetch"
        return np.stack([o.T, again * q, again * kv, q.T, kv.T])

    def digest(self) -> int:
        """63-bit fingerprint of the whole plan; equal on every rank that may exchange under it."""
        return fingerprint(self.to_buffer().tobytes())

    def to_buffer(self) -> NDArray[np.uint8]:
        """The plan as one flat buffer, uint8; `from_buffer` restores it."""
        settings = _settings(self.config, self.heads)
        header = np.array([settings, self.tokens, self.cp_size, self.shards], dtype=np.int64)
        speeds = np.empty(0, dtype=np.int64) if self.speeds is None else self.speeds
        return _pack([header, self.assignment, self.geometry.block_start, speeds, *self.cu_seqlens])

    @staticmethod
    def from_buffer(buffer: NDArray[np.uint8], config: PoolConfig, heads: HeadShape) -> PoolPlan:
        """Restore a plan made elsewhere for the same configuration and heads.

        Raises ValueError for a foreign, truncated or damaged buffer, another version, or other
        settings than given.
        """
        header, assignment, cuts, speeds, *bounds = _unpack(buffer)
        settings, tokens, cp_size, shards = header.tolist()
        if settings != _settings(config, heads):
            raise ValueError(
                f"the plan was made for another configuration or head shape than {config}, {heads}"
            )
        geometry = pool_geometry(bounds, cp_size=cp_size, layout=config.shard_layout, tokens=tokens)
        return PoolPlan(
            geometry=with_cuts(geometry, cuts),
            config=config,
            heads=heads,
            shards=shards,
            assignment=assignment,
            speeds=speeds if len(speeds) else None,
        )


def fingerprint(data: bytes) -> int:
    """63-bit hash."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _settings(config: PoolConfig, heads: HeadShape) -> int:
    """Fingerprint of all settings that shape a plan or its execution."""
    return fingerprint(repr((dataclasses.astuple(config), dataclasses.astuple(heads))).encode())


def _pack(arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """One buffer, uint8, of int32 and int64 arrays; all words are little-endian int64.

    magic | version | arrays | item size and length of each | the arrays, one after the other |
    checksum
    """
    shapes = [number for array in arrays for number in (array.itemsize, array.size)]
    body = np.array([_MAGIC, _VERSION, len(arrays), *shapes], dtype="<i8").tobytes()
    body += b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return np.frombuffer(body + _checksum(body), dtype=np.uint8)


def _unpack(buffer: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """The arrays of a buffer made by `_pack`; nothing is unpickled.  Raises ValueError for any
    other buffer.
    """
    data = np.ascontiguousarray(buffer).tobytes()
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(body) < 24:
        raise ValueError(f"a plan buffer of {len(data)} bytes is truncated")
    magic, version, count = np.frombuffer(body, "<i8", 3).tolist()
    if magic != _MAGIC:
        raise ValueError("the buffer is not a Libra plan: its first bytes are foreign")
    if version != _VERSION:
        raise ValueError(f"plan buffer version {version}; this build reads version {_VERSION}")
    if checksum != _checksum(body):
        raise ValueError("the plan buffer is truncated or damaged: its checksum differs")
    # 24 bytes of magic, version and count; 16 bytes of item size and length for each array.
    shapes = np.frombuffer(body, "<i8", 2 * count, 24).reshape(count, 2).tolist()
    at, arrays = 24 + 16 * count, []
    for item_size, length in shapes:
        data_type = np.int32 if item_size == 4 else np.int64
        arrays.append(np.frombuffer(body, data_type, length, at))
        at += item_size * length
    return arrays


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
