"""PoolPlan: everything both halves need to know about one pool's attention, and its wire form."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.config import HeadShape, PoolConfig
from libra.plan.geometry import Geometry, pool_geometry
from libra.plan.lanes import Lanes, cut_lanes
from libra.plan.needs import KVTransfers, Needs, kv_transfers, pool_needs
from libra.plan.ulysses import check_ulysses, place_ulysses
from libra.workload import check_cu_seqlens

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
    assignment: NDArray[np.int32]
    """Worker of each tile."""

    @cached_property
    def geometry(self) -> Geometry:
        """Samples, fragments and blocks of the pool."""
        return pool_geometry(
            self.cu_seqlens,
            cp_size=self.cp_size,
            block_size=block_size(self.config, self.tokens),
            layout=self.config.shard_layout,
            tokens=self.tokens,
        )

    @cached_property
    def lanes(self) -> Lanes:
        """How heads are cut."""
        return cut_lanes(self.heads, head_shards(self.config, self.cp_size), self.config.chunks)

    @cached_property
    def needs(self) -> Needs:
        """K and V rows that each worker needs."""
        whole = self.config.placement == "paper"
        return pool_needs(self.geometry, self.assignment, self.lanes, complete_groups=whole)

    @cached_property
    def kv_transfers(self) -> KVTransfers:
        """Runs of K and V rows that needs are assembled from."""
        return kv_transfers(self.geometry, self.needs)

    @property
    def workers(self) -> int:
        """W = P * CP."""
        return len(self.cu_seqlens) * self.cp_size

    @cached_property
    def load(self) -> IntArray:
        """Causal query-key pairs times heads of each worker, int64 [workers]."""
        shards = self.lanes.shards
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
        """max/mean - 1 of `load`."""
        return float(self.load.max() / self.load.mean() - 1)

    @cached_property
    def traffic(self) -> IntArray:
        """Forward bytes from worker i to worker j: int64 [3, workers, workers] for Q, K with V, and
        O.
        """
        workers, heads, lanes = self.workers, self.heads, self.lanes
        traffic = np.zeros((3, workers, workers), dtype=np.int64)
        home = np.repeat(self.geometry.block_worker, lanes.shards)
        rows = np.repeat(self.geometry.block_stop - self.geometry.block_start, lanes.shards)
        away = home != self.assignment
        elements = rows[away] * (heads.q // lanes.shards) * heads.bytes
        np.add.at(traffic[0], (home[away], self.assignment[away]), elements * heads.dim)
        np.add.at(traffic[2], (self.assignment[away], home[away]), elements * heads.value_dim)
        moves = self.kv_transfers
        away = moves.source != moves.destination
        row_bytes = lanes.kv_heads * (heads.dim + heads.value_dim) * heads.bytes
        np.add.at(
            traffic[1],
            (moves.source[away], moves.destination[away]),
            moves.length[away] * row_bytes,
        )
        return traffic

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
        return _digest(self.to_buffer())

    def to_buffer(self) -> NDArray[np.uint8]:
        """The plan as one flat buffer, uint8; `from_buffer` restores it."""
        header = [
            _MAGIC,
            _VERSION,
            self.tokens,
            self.cp_size,
            len(self.cu_seqlens),
            len(self.assignment),
        ]
        arrays = [
            np.array(header, dtype=np.int64),
            encode_settings(self.config, self.heads),
            np.array([len(cu) for cu in self.cu_seqlens], dtype=np.int64),
            *self.cu_seqlens,
            self.assignment,
        ]
        body = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
        return np.frombuffer(body + _checksum(body), dtype=np.uint8)

    @staticmethod
    def from_buffer(buffer: NDArray[np.uint8], config: PoolConfig, heads: HeadShape) -> PoolPlan:
        """Restore a plan made elsewhere for the same configuration and heads.

        Raises ValueError for a foreign, truncated or damaged buffer, another version, or other
        settings than given.
        """
        body = bytes(buffer)
        words = len(encode_settings(config, heads))
        if len(body) < 8 * (6 + words) + _CHECKSUM_BYTES:
            raise ValueError(f"a plan buffer of {len(body)} bytes is truncated")
        body, checksum = body[:-_CHECKSUM_BYTES], body[-_CHECKSUM_BYTES:]
        magic, version, tokens, cp_size, packs, tiles = np.frombuffer(body, np.int64, 6)
        if magic != _MAGIC:
            raise ValueError("the buffer is not a Libra plan (its first bytes are foreign)")
        if version != _VERSION:
            raise ValueError(f"plan buffer version {version}; this build reads version {_VERSION}")
        if checksum != _checksum(body):
            raise ValueError("the plan buffer is truncated or damaged (its checksum differs)")
        if not np.array_equal(
            np.frombuffer(body, np.int64, words, 48), encode_settings(config, heads)
        ):
            raise ValueError(
                f"the plan was made for another configuration or head shape than {config}, {heads}"
            )
        at = 48 + 8 * words
        counts = np.frombuffer(body, np.int64, packs, at)
        at += 8 * int(packs)
        bounds = np.split(
            np.frombuffer(body, np.int64, int(counts.sum()), at), np.cumsum(counts)[:-1]
        )
        at += 8 * int(counts.sum())
        return PoolPlan(
            cu_seqlens=tuple(bounds),
            tokens=int(tokens),
            cp_size=int(cp_size),
            config=config,
            heads=heads,
            assignment=np.frombuffer(body, np.int32, int(tiles), at),
        )


def plan_pool(
    cu_seqlens_per_pack: Sequence[ArrayLike],
    *,
    cp_size: int,
    config: PoolConfig,
    heads: HeadShape,
    tokens: int | None = None,
) -> PoolPlan:
    """Plan the attention of one pool: which worker computes which tile, and what travels.

    `cu_seqlens_per_pack` holds one int array a pack, [samples + 1] from 0; `tokens` is L where
    packs end in padding (None: all packs end at the same token).  Pure and deterministic: the same
    arguments give the same plan everywhere.

    Raises ValueError for lengths that don't fit, heads that don't divide by H and M, or a pool of
    other than P packs.
    """
    if len(cu_seqlens_per_pack) != config.pool_size:
        raise ValueError(
            f"{len(cu_seqlens_per_pack)} packs for a pool of pool_size={config.pool_size}; give "
            "one cu_seqlens a replica"
        )
    if config.placement == "ulysses":
        check_ulysses(heads, cp_size)
    shards = head_shards(config, cp_size)
    cut_lanes(heads, shards, config.chunks)  # refuses heads that don't divide, before any work
    bounds = tuple(check_cu_seqlens(cu, tokens=tokens) for cu in cu_seqlens_per_pack)
    length = int(bounds[0][-1]) if tokens is None else tokens
    geometry = pool_geometry(
        bounds,
        cp_size=cp_size,
        block_size=block_size(config, length),
        layout=config.shard_layout,
        tokens=tokens,
    )
    if config.placement == "ulysses":
        assignment = place_ulysses(geometry)
    else:
        from libra.plan.paper import place_paper  # numba, half a second: only where a plan is made

        assignment = place_paper(geometry, heads, shards, config.tolerance)
    plan = PoolPlan(
        cu_seqlens=bounds,
        tokens=length,
        cp_size=cp_size,
        config=config,
        heads=heads,
        assignment=assignment,
    )
    plan.__dict__["geometry"] = geometry  # already made: spare the cached property the work
    return plan


def head_shards(config: PoolConfig, cp_size: int) -> int:
    """H in force: Ulysses always has one shard a CP rank."""
    return cp_size if config.placement == "ulysses" else config.head_shards


def block_size(config: PoolConfig, tokens: int) -> int:
    """B in force: Ulysses cuts no blocks but the shards themselves."""
    return tokens if config.placement == "ulysses" else config.block_size


def encode_settings(config: PoolConfig, heads: HeadShape) -> IntArray:
    """Everything of the settings that shapes a plan or its execution, as int64 words for the
    wire.
    """
    text = repr((dataclasses.astuple(config), dataclasses.astuple(heads))).encode()
    return np.array([_digest(np.frombuffer(text, dtype=np.uint8))], dtype=np.int64)


_MAGIC = int.from_bytes(b"LIBRAPLN", "little")
_VERSION = 1
_CHECKSUM_BYTES = 8


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def _digest(data: NDArray[np.uint8]) -> int:
    return int.from_bytes(hashlib.blake2b(data.tobytes(), digest_size=8).digest(), "little") >> 1
