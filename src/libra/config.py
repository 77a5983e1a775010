"""Settings that a user chooses: the shape of a pool and of the attention heads.  Both classes check
their values when made, and are frozen.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, TypeGuard

Placement = Literal["surplus", "paper", "ulysses"]
ShardLayout = Literal["contiguous", "zigzag"]
BackwardMode = Literal["retain", "refetch"]
Speeds = Literal["equal", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How a sequence pool cuts, places and moves attention.  The same class is the API and the
    command line.
    """

    pool_size: int = 8
    """P: neighbouring data-parallel replicas that share their attention.  Must divide the
    data-parallel size.
    """

    block_size: int = 4096
    """B: most query rows of a tile of `paper`.  Smaller tiles balance better, larger ones need
    fewer kernel segments.  `surplus` cuts at any row.
    """

    head_shards: int = 1
    """H: head shards of a block.  Must divide the query heads."""

    chunks: int = 4
    """M: equal groups of heads.  Transfers of one overlap the attention of another.  Must divide
    the query heads of a head shard.
    """

    placement: Placement = "surplus"
    """`surplus` leaves tiles at home and moves only the work above the target.  `paper` is the
    greedy of the Libra paper over all B x H tiles.  `ulysses` shares heads over the CP group: the
    baseline.
    """

    tolerance: float = 0.03
    """tau: the target of a worker's load is (1 + tau) times the pool's mean."""

    shard_layout: ShardLayout = "contiguous"
    """Which rows of a pack a context-parallel rank holds: one run (`contiguous`), or one run from
    the head and one from the tail of the pack (`zigzag`).
    """

    backward: BackwardMode = "retain"
    """`retain` keeps fetched Q, K and V until backward.  `refetch` keeps outputs and LSE only, and
    fetches the others again.
    """

    traffic_limit: float = math.inf
    """Most bytes that a worker sends, and most that it receives, in one pass for work that is
    computed away from home.  The unit is the bytes of its own q, k, v and out; `inf` means no
    limit.  Work that would exceed the limit stays at home (`surplus` only).
    """

    memory_limit: float = math.inf
    """Most bytes of other workers' q, k, v and out that a worker holds in a forward pass for work
    that it took, in the same unit.  Work that would exceed the limit stays at home (`surplus`
    only).
    """

    ranks_per_node: int = 8
    """Neighbouring workers of the pool, counted from worker 0, that share a node: 8 GPUs, or 1
    where tensor parallelism fills a node.  Workers of a node take each other's surplus first.  K
    and V that several workers of other nodes need travel by multicast (`surplus` only).
    """

    speeds: Speeds = "equal"
    """`equal` gives all workers the same target.  With `measured` the target of a worker follows
    the speed of its kernels, measured while training runs (`surplus` only).
    """

    def __post_init__(self) -> None:
        for name in ("pool_size", "block_size", "head_shards", "chunks", "ranks_per_node"):
            _positive("PoolConfig", name, getattr(self, name))
        if not (is_finite(self.tolerance) and self.tolerance >= 0):
            raise ValueError(
                f"PoolConfig.tolerance is {self.tolerance!r}; it must be a finite number >= 0"
            )
        # One spelling of one value: 0, 0.0 and a numpy float make the same plan fingerprint.
        object.__setattr__(self, "tolerance", float(self.tolerance))
        for name in ("traffic_limit", "memory_limit"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise ValueError(
                    f"PoolConfig.{name} is {value!r}; it must be a number >= 0, inf for no limit"
                )
            object.__setattr__(self, name, float(value))
        _one_of("placement", self.placement, ("surplus", "paper", "ulysses"))
        _one_of("shard_layout", self.shard_layout, ("contiguous", "zigzag"))
        _one_of("backward", self.backward, ("retain", "refetch"))
        _one_of("speeds", self.speeds, ("equal", "measured"))
        if self.speeds == "measured" and self.placement != "surplus":
            raise ValueError(
                f"speeds='measured' needs placement='surplus'; placement is {self.placement!r}"
            )
        if self.placement == "ulysses" and self.pool_size != 1:
            raise ValueError(
                "placement='ulysses' stays inside one CP group, but pool_size is "
                f"{self.pool_size}; set pool_size=1"
            )

    def replace(self, **changes: object) -> PoolConfig:
        """A copy with the named fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def ulysses_baseline(config: PoolConfig) -> PoolConfig:
    """The Ulysses baseline of a configuration: every pack on its own CP group, without overlap of
    transfers and compute.
    """
    return PoolConfig(
        pool_size=1,
        placement="ulysses",
        chunks=1,
        shard_layout=config.shard_layout,
        backward=config.backward,
        ranks_per_node=config.ranks_per_node,
    )


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a setting is a number, neither a bool nor NaN nor infinite."""
    return _is_number(value) and math.isfinite(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _positive(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner}.{name} is {value!r}; it must be an integer >= 1")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(
            f"PoolConfig.{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}"
        )


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention heads of one layer, as the planner counts them."""

    q: int
    """Query heads."""

    kv: int
    """Key/value heads; must divide the query heads."""

    dim: int
    """Elements of one query or key head."""

    bytes: int = 2
    """Bytes of one element: 2 for bf16 and fp16, 4 for fp32."""

    v_dim: int | None = None
    """Elements of one value head; None means the same as `dim`."""

    def __post_init__(self) -> None:
        for name in ("q", "kv", "dim", "bytes"):
            _positive("HeadShape", name, getattr(self, name))
        if self.v_dim is not None:
            _positive("HeadShape", "v_dim", self.v_dim)
        if self.q % self.kv:
            raise ValueError(
                f"{self.q} query heads over {self.kv} key/value heads: kv must divide q "
                "(grouped-query attention)"
            )

    @property
    def value_dim(self) -> int:
        """Elements of one value head."""
        return self.dim if self.v_dim is None else self.v_dim

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q // self.kv

    def q_bytes(self, heads: int) -> int:
        """Bytes of Q of one token and so many query heads."""
        return heads * self.dim * self.bytes

    def o_bytes(self, heads: int) -> int:
        """Bytes of the output of one token and so many query heads."""
        return heads * self.value_dim * self.bytes

    def kv_bytes(self, kv_heads: int) -> int:
        """Bytes of K and V of one token and so many key/value heads."""
        return kv_heads * (self.dim + self.value_dim) * self.bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of q, k, v and out of one token."""
        return self.q_bytes(self.q) + self.kv_bytes(self.kv) + self.o_bytes(self.q)
