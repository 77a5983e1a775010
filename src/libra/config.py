"""Settings that a user chooses: the shape of a pool and of the attention heads.  Both classes check
their values when made, and are frozen.  The checks of any setting stand below them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import numpy as np

Placement = Literal["surplus", "paper", "ulysses"]
ShardLayout = Literal["contiguous", "zigzag"]
BackwardMode = Literal["retain", "refetch"]
Speeds = Literal["equal", "measured"]
_WORDS: Final = {bool: "true or false", str: "text"}


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
    that it took, in multiples of the bytes of its own.  Work that would exceed the limit stays at
    home (`surplus` only).
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
        limits = ("traffic_limit", "memory_limit")
        checked = check_fields(self, zero=("tolerance", *limits), endless=limits)
        # One spelling of one value: 0, 0.0 and a numpy float make the same plan fingerprint.
        for name, number in checked.items():
            object.__setattr__(self, name, number)
        # Settings that exclude each other.
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
        for name, number in check_fields(self).items():
            object.__setattr__(self, name, number)
        if self.v_dim is not None:
            check_count("HeadShape.v_dim", self.v_dim)
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


def check_fields(
    settings: object,
    *,
    zero: Collection[str] = (),
    shares: Collection[str] = (),
    endless: Collection[str] = (),
) -> dict[str, int | float]:
    """Check every field of a dataclass: text, true or false, one of its choices, or a number.

    Numbers must be finite and > 0; those named in `zero` may be 0, those in `endless` infinite, and
    those in `shares` are at most 1.  Fields of other types are left to the dataclass.  Returns the
    numbers as Python's own.
    """
    kind: type = type(settings)
    numbers: dict[str, int | float] = {}
    # bool is a subclass of int: `check_count` and `check_number` refuse it where a number is due.
    for name, hint in _types(kind).items():
        where, value = f"{kind.__name__}.{name}", getattr(settings, name)
        # The type says what a value may be, the arguments only what a type cannot.
        if get_origin(hint) is Literal:
            check_choice(where, value, get_args(hint))
        elif hint in _WORDS:
            if not isinstance(value, hint) or value == "":
                raise ValueError(f"{where} is {value!r}; it must be {_WORDS[hint]}")
        elif hint is int:
            numbers[name] = check_count(where, value, least=0 if name in zero else 1)
        elif hint is float:
            most = 1 if name in shares else math.inf
            numbers[name] = check_number(
                where, value, zero=name in zero, most=most, endless=name in endless
            )
    return numbers


@cache
def _types(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields, looked up once: that costs more than all the checks."""
    return get_type_hints(kind)


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """A user's setting as an int; ValueError unless it is an integer >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer >= {least}")
    return int(value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError unless a user's setting is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")


def check_number(
    name: str, value: object, *, zero: bool = False, most: float = math.inf, endless: bool = False
) -> float:
    """A user's setting as a float; ValueError unless it is > 0 (or 0 where `zero` allows it), at
    most `most`, and finite unless `endless`.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, float | int)
        or not 0 <= value <= most  # NaN too, which no comparison holds for
        or (value == 0 and not zero)
        or (value == math.inf and not endless)
    ):
        need = f"{'a number' if endless else 'a finite number'} {'>= 0' if zero else '> 0'}"
        need += ", inf for no limit" if endless else ""
        need += "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} is {value!r}; it must be {need}")
    return float(value)
