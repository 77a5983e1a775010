"""PoolPlan: everything both halves need to know about one pool's attention, and its wire form."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.geometry import Geometry, pool_geometry, with_cuts
from libra.plan.head_groups import HeadGroups, cut_heads
from libra.plan.kv_fetch import (
    KVBufferRows,
    KVFetches,
    KVTransfers,
    kv_buffer_rows,
    kv_transfers,
    pool_kv_fetches,
)
from libra.plan.kv_multicast import relieves, sent_rows, with_multicast
from libra.plan.wire import fingerprint, pack, unpack

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PoolPlan:
    """Which worker computes which tile of a pool, and what must travel for it.

    Tile ID = block * H + shard, blocks counted through the pool: (pack * blocks + block) * H +
    shard.
    """

    cu_seqlens: tuple[IntArray, ...]
    """Sample bounds of each pack, zero-length samples dropped."""
    tokens: int
    """L, padding included."""
    cp_size: int
    config: PoolConfig
    heads: HeadShape
    cuts: IntArray
    """Pool position at which each block starts."""
    shards: int
    """Head shards of a block, H in force."""
    assignment: NDArray[np.int32]
    """Worker of each tile, [blocks * H]."""
    speeds: IntArray | None = None
    """Speed of each worker in thousandths of their mean, [workers]; None where all are equal."""

    @cached_property
    def geometry(self) -> Geometry:
        """Samples, fragments and blocks of the pool."""
        unblocked = pool_geometry(
            self.cu_seqlens,
            cp_size=self.cp_size,
            block_size=self.tokens,
            layout=self.config.shard_layout,
            tokens=self.tokens,
        )
        return with_cuts(unblocked, self.cuts)

    @cached_property
    def head_groups(self) -> HeadGroups:
        """How heads are cut."""
        return cut_heads(self.heads, self.shards, self.config.chunks)

    @cached_property
    def kv_fetches(self) -> KVFetches:
        """K and V rows that each worker needs."""
        whole = self.config.placement == "paper"
        return pool_kv_fetches(
            self.geometry, self.assignment, self.head_groups, complete_groups=whole
        )

    @cached_property
    def kv_transfers(self) -> KVTransfers:
        """Runs of K and V rows that needs are assembled from.

        `surplus` has relays pass them on where that relieves the busiest sender.
        """
        direct = kv_transfers(self.geometry, self.kv_fetches)
        if self.config.placement != "surplus":
            return direct
        per_node = self.config.ranks_per_node
        relayed = with_multicast(direct, self.kv_fetches, workers=self.workers, per_node=per_node)
        if relayed is direct:
            return direct
        node = np.arange(self.workers) // per_node
        rest = self._query_traffic.sum(axis=0)
        sent = np.stack([(rest * (node[:, None] != node)).sum(axis=1), rest.sum(axis=1)])
        before, after = (
            sent + self._kv_row * sent_rows(moves, self.workers, per_node)
            for moves in (direct, relayed)
        )
        return relayed if relieves(before, after) else direct

    @cached_property
    def kv_buffer_rows(self) -> KVBufferRows:
        """Where K and V lie at the workers that fetch them."""
        return kv_buffer_rows(self.kv_transfers, self.kv_fetches, self.workers)

    @property
    def workers(self) -> int:
        """W = P * CP."""
        return len(self.cu_seqlens) * self.cp_size

    @cached_property
    def load(self) -> IntArray:
        """Causal query-key pairs times heads of each worker, int64 [workers]."""
        shards = self.head_groups.shards
        cost = np.repeat(self.geometry.block_pairs * (self.heads.q // shards), shards)
        load = np.zeros(self.workers, dtype=np.int64)
        np.add.at(load, self.assignment, cost)
        return load

    @property
    def home_load(self) -> IntArray:
        """Load of each worker if nothing moved, int64 [workers]."""
        load = np.zeros(self.workers, dtype=np.int64)
        np.add.at(load, self.geometry.block_worker, self.geometry.block_pairs * self.heads.q)
        return load

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
        q, o = self._query_traffic
        return np.stack([q, self._kv_traffic(self.kv_transfers), o])

    @cached_property
    def _query_traffic(self) -> IntArray:
        """Forward bytes of Q and O, [2, workers, workers]."""
        heads, head_groups = self.heads, self.head_groups
        traffic = np.zeros((2, self.workers, self.workers), dtype=np.int64)
        home = np.repeat(self.geometry.block_worker, head_groups.shards)
        rows = np.repeat(self.geometry.block_stop - self.geometry.block_start, head_groups.shards)
        away = home != self.assignment
        elements = rows[away] * (heads.q // head_groups.shards) * heads.bytes
        np.add.at(traffic[0], (home[away], self.assignment[away]), elements * heads.dim)
        np.add.at(traffic[1], (self.assignment[away], home[away]), elements * heads.value_dim)
        return traffic

    def _kv_traffic(self, moves: KVTransfers) -> IntArray:
        """Bytes of K and V from worker i to worker j, both hops, [workers, workers]."""
        rows: IntArray = moves.rows(self.workers, self.head_groups.chunks).sum(axis=(0, 1))
        return rows * self._kv_row

    @property
    def _kv_row(self) -> int:
        """Bytes of K and V of one row of a kv head_group."""
        return (
            self.head_groups.kv_heads * (self.heads.dim + self.heads.value_dim) * self.heads.bytes
        )

    @property
    def backward_traffic(self) -> IntArray:
        """Backward bytes from worker i to worker j: int64 [5, workers, workers] for dO, Q and K
        with V where they are fetched again, dQ, and dK with dV.
        """
        q, kv, o = self.traffic
        again = self.config.backward == "refetch"
        return np.stack([o.T, again * q, again * kv, q.T, kv.T])

    @property
    def bytes_q(self) -> int:
        """Query bytes that travel in a forward pass, all workers."""
        return int(self.traffic[0].sum())

    @property
    def bytes_kv(self) -> int:
        """Key and value bytes that travel in a forward pass, all workers."""
        return int(self.traffic[1].sum())

    @property
    def bytes_o(self) -> int:
        """Output bytes that travel in a forward pass, all workers."""
        return int(self.traffic[2].sum())

    def digest(self) -> int:
        """63-bit fingerprint of the whole plan; equal on every rank that may exchange under it."""
        return fingerprint(self.to_buffer().tobytes())

    def to_buffer(self) -> NDArray[np.uint8]:
        """The plan as one flat buffer, uint8; `from_buffer` restores it."""
        settings = _settings(self.config, self.heads)
        header = np.array([settings, self.tokens, self.cp_size, self.shards], dtype=np.int64)
        speeds = np.empty(0, dtype=np.int64) if self.speeds is None else self.speeds
        return pack([header, self.assignment, self.cuts, speeds, *self.cu_seqlens])

    @staticmethod
    def from_buffer(buffer: NDArray[np.uint8], config: PoolConfig, heads: HeadShape) -> PoolPlan:
        """Restore a plan made elsewhere for the same configuration and heads.

        Raises ValueError for a foreign, truncated or damaged buffer, another version, or other
        settings than given.
        """
        header, assignment, cuts, speeds, *bounds = unpack(buffer)
        settings, tokens, cp_size, shards = header.tolist()
        if settings != _settings(config, heads):
            raise ValueError(
                f"the plan was made for another configuration or head shape than {config}, {heads}"
            )
        return PoolPlan(
            cu_seqlens=tuple(bounds),
            tokens=tokens,
            cp_size=cp_size,
            config=config,
            heads=heads,
            cuts=cuts,
            shards=shards,
            assignment=assignment,
            speeds=speeds if len(speeds) else None,
        )


def _settings(config: PoolConfig, heads: HeadShape) -> int:
    """Fingerprint of all settings that shape a plan or its execution."""
    return fingerprint(repr((dataclasses.astuple(config), dataclasses.astuple(heads))).encode())
