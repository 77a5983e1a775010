"""The ways to balance attention that are compared: one table for simulator and benchmark.

Each scheme is a row of `SCHEMES`: which samples make up a pack, how many replicas share a pool,
which packs share a pool, where the work of a pool is computed, and whether chunks overlap transfers
with computation.

    key        packs    pool         packs of a pool          inside a pool           overlap
    ulysses    fixed    one replica  -                        heads over the CP group  no
    ring       fixed    one replica  -                        K and V round the group  no
    wlb        by cost  one replica  -                        heads over the CP group  no
    cluster    fixed    all          sampler order            tiles placed             yes
    tap        fixed    P            sampler order            tiles placed             no
    tap_vrsp   fixed    P            VRSP                     tiles placed             no
    libra      fixed    P            VRSP, refined, grouped   tiles placed             yes
    ideal      fixed    one replica  -                        equal shares, no bytes   -
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, get_args

from numpy.typing import ArrayLike

from libra.config import PoolConfig, ulysses_baseline
from libra.data.lengths import IntArray
from libra.data.pools import PackPlacement, PoolOrder, make_pools

MeasuredKey = Literal["ulysses", "ring", "wlb", "cluster", "tap", "tap_vrsp", "libra"]
SchemeKey = Literal[MeasuredKey, "ideal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to balance attention."""

    key: SchemeKey
    label: str
    """Name for readers."""

    packing: Literal["fixed", "by-cost"] = "fixed"
    """Packs of exactly L tokens as the corpus has them, or the window's samples packed again so
    that packs cost the same (`libra.baselines.wlb`).
    """

    pool: Literal["replica", "bounded", "cluster"] = "replica"
    """Replicas that share a pool: one, P as configured, or all."""

    placement: Literal["ulysses", "ring", "tiles", "ideal"]
    """Where the work of a pool is computed.  `tiles` is the placement of the configuration;
    `ideal` computes the work of Ulysses in equal shares on all workers and moves nothing.
    """

    pack_placement: PackPlacement = "contiguous"
    """Which packs share a pool: neighbours in sampler order, or VRSP's choice."""

    refine: bool = False
    """Whether VRSP's pools are refined by swaps."""

    order: PoolOrder = "index"
    """Order of the pools over the accumulation indices."""

    overlap: bool = False
    """Whether chunks overlap transfers with computation."""

    def pool_size(self, configured: int, dp_size: int) -> int:
        """Replicas of a pool, where P is `configured`; pools larger than the job shrink to it."""
        sizes = {"replica": 1, "bounded": min(configured, dp_size), "cluster": dp_size}
        return sizes[self.pool]

    def pools(self, workloads: ArrayLike, pool_size: int, pools_per_index: int) -> IntArray:
        """Packs of every pool in the order of emission, int64 [K, P]; see `libra.data.pools`."""
        return make_pools(
            workloads,
            pool_size,
            pools_per_index,
            placement=self.pack_placement,
            refine=self.refine,
            order=self.order,
        )

    def pool_config(self, config: PoolConfig, dp_size: int) -> PoolConfig:
        """The pools of a run, where `config` is Libra's: without overlap there is one chunk.

        Ring attention makes no plan; of its configuration only the shards of a CP group count.
        """
        if self.placement == "ring":
            return PoolConfig(pool_size=1, chunks=1, shard_layout="zigzag")
        if self.placement != "tiles":
            return ulysses_baseline(config)
        pool = config.replace(pool_size=self.pool_size(config.pool_size, dp_size))
        return pool if self.overlap else pool.replace(chunks=1)


_TAP: Final = Scheme(key="tap", label="TAP", pool="bounded", placement="tiles")
_TABLE: Final = (
    Scheme(key="ulysses", label="Ulysses", placement="ulysses"),
    Scheme(key="ring", label="ring, zigzag", placement="ring"),
    Scheme(key="wlb", label="WLB-LLM style packing", packing="by-cost", placement="ulysses"),
    Scheme(
        key="cluster", label="cluster-wide pool", pool="cluster", placement="tiles", overlap=True
    ),
    _TAP,
    replace(_TAP, key="tap_vrsp", label="TAP + VRSP", pack_placement="vrsp"),
    replace(
        _TAP,
        key="libra",
        label="Libra",
        pack_placement="vrsp",
        refine=True,
        order="grouped",
        overlap=True,
    ),
    Scheme(key="ideal", label="ideal", placement="ideal"),
)

SCHEMES: Final[Mapping[str, Scheme]] = MappingProxyType({each.key: each for each in _TABLE})
"""Every scheme by its key, Ulysses first."""

PREDICTED: Final = tuple(each.key for each in _TABLE if each.placement != "ring")
"""Keys of the schemes that the simulator predicts."""

MEASURED: Final[tuple[MeasuredKey, ...]] = get_args(MeasuredKey)
"""Keys of the schemes that the benchmark runs."""
