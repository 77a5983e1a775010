"""One window of one candidate: place its packs, plan its pools, keep the figures.

Three imbalances, which must not be confused, all 0 at best:

- *pools*: between the pools of a window.  Heaviest pool's workload (sum of squared lengths) over
  the mean pool's, - 1.  VRSP and refinement lower it.
- *workers*: inside one pool.  Busiest worker's query-key pairs times heads over the mean of the
  same pool's workers, - 1.  The plan lowers it.
- *steps*: over an optimizer step.  The busiest worker's pairs of each gradient-accumulation index,
  summed over the indices, over the same sum if all workers of the window were equally busy, - 1:
  the attention time that the step loses to waiting where replicas synchronise at every index.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.cost.attention_time import AttentionCost
from libra.data.lengths import causal_pairs
from libra.data.packing import Packs
from libra.data.pools import contiguous_pools, distance_to_bound, imbalance, pool_loads
from libra.plan.pool_plan import PoolPlan
from libra.simulate.pooling import heaviest_pack
from libra.simulate.predict import Setting, WindowSeconds
from libra.simulate.results import Candidate
from libra.simulate.schemes import SCHEMES

FloatArray = NDArray[np.float64]

LIBRA: Final = SCHEMES["libra"]
"""Groups the packs of a window into pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReplay:
    """One pool as planned; bytes that move are of one layer's forward."""

    cost: AttentionCost
    """Predicted seconds, and bytes that a worker holds."""
    workers_before: float
    """Workers imbalance if every row were computed where it lies."""
    workers_after: float
    """Workers imbalance as planned."""
    load: float
    """Query-key pairs times heads of the pool."""
    busiest_home: float
    """Those of its busiest worker, if every row were computed where it lies."""
    busiest: float
    """Those of its busiest worker as planned."""
    moved_bytes: float
    """Bytes that leave a worker."""
    across_bytes: float
    """Bytes that leave their node."""
    worst_sent: float
    """Bytes of the worker that sends most."""
    worst_received: float
    """Bytes of the worker that receives most."""
    worst_across: float
    """Bytes between nodes of the worker that has most of them, sent or received."""
    tiles: float
    """Tiles of the plan."""
    moved_tiles: float
    """Tiles computed away from home."""
    planning_seconds: float
    """Time to make the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReplay:
    """One candidate on one window."""

    window: int
    """Counted from the corpus's first."""
    heaviest_pack: float
    """Workload of the heaviest pack over the mean pack's: no pool smaller than that balances."""
    pools_before: float
    """Pools imbalance of packs grouped in sampler order."""
    pools_after: float
    """Pools imbalance as placed."""
    pools_above_bound: float
    """Heaviest pool over the least any placement could make it, - 1."""
    steps_before: float
    """Steps imbalance of Ulysses: packs in sampler order, each shared equally by its CP group."""
    steps_after: float
    """Steps imbalance as placed and planned."""
    pools: tuple[PoolReplay, ...]
    """Every pool in the order of emission."""

    def seconds(self, pool_size: int) -> WindowSeconds:
        """The attention seconds of the pools."""
        return WindowSeconds.of_pools([pool.cost for pool in self.pools], pool_size=pool_size)

    def figures(self) -> dict[str, list[float]]:
        """Every figure by its name: one value of the window's, one a pool of the pools' and of
        their costs'.
        """
        plain = asdict(self)
        pools = plain.pop("pools")
        del plain["window"]
        rows = [{**pool, **pool["cost"]} for pool in pools]
        of_pools = {name: [row[name] for row in rows] for name in rows[0] if name != "cost"}
        return {name: [value] for name, value in plain.items()} | of_pools

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> WindowReplay:
        """The window that `dataclasses.asdict` made `plain` of.

        Raises KeyError or TypeError for anything else.
        """
        pools = tuple(
            PoolReplay(**{**pool, "cost": AttentionCost(**pool["cost"])}) for pool in plain["pools"]
        )
        return WindowReplay(**{**plain, "pools": pools})


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTask:
    """All that a process needs to replay one window of one candidate."""

    window: int
    """Counted from the corpus's first."""
    packs: Packs
    candidate: Candidate
    setting: Setting

    def digest(self) -> str:
        """Fingerprint of the window's packs."""
        packs = self.packs
        parts = (np.array([packs.tokens]), packs.offsets - packs.offsets[0], packs.lengths)
        data = b"".join(part.astype("<i8").tobytes() for part in parts)
        return hashlib.sha256(data).hexdigest()[:16]


def replay_window(task: WindowTask) -> WindowReplay:
    """Place and plan one window as `PoolSampler` and the runtime do."""
    packs, setting, size = task.packs, task.setting, task.candidate.pool_size
    config, spread = task.candidate.config(setting.config), setting.parallelism
    weights = packs.workloads
    # Step 1: pools as the sampler makes them, and a plan of each.
    pools = LIBRA.pools(weights, size, spread.dp // size)
    found = []
    for pool in pools:
        begin = time.perf_counter()
        plan = setting.plan(map(packs.lengths_of, pool), packs.tokens, config)
        seconds = time.perf_counter() - begin
        found.append(pool_figures(plan, setting.time(plan), planning_seconds=seconds))
    # Step 2: imbalances of the window.
    loads = np.array([pool.load for pool in found])
    busiest = np.array([pool.busiest for pool in found])
    pairs = np.array([causal_pairs(0, lengths).sum(dtype=np.float64) for lengths in packs])
    return WindowReplay(
        window=task.window,
        heaviest_pack=heaviest_pack(weights),
        pools_before=imbalance(pool_loads(weights, contiguous_pools(len(packs), size))),
        pools_after=imbalance(pool_loads(weights, pools)),
        pools_above_bound=distance_to_bound(weights, pools),
        # Under Ulysses all workers of a pack are equally busy, so a pack stands for each of them.
        steps_before=_step_imbalance(pairs, pairs, spread.dp),
        steps_after=_step_imbalance(busiest, loads / (size * spread.cp), spread.dp // size),
        pools=tuple(found),
    )


def pool_figures(plan: PoolPlan, cost: AttentionCost, *, planning_seconds: float) -> PoolReplay:
    """The figures of one plan, which costs `cost`."""
    # Step 1: loads of the workers, and bytes that pass between them.
    load, home = plan.load, plan.home_load
    traffic = plan.traffic.sum(axis=0)  # [workers, workers], from row to column
    node = np.arange(plan.workers) // plan.config.ranks_per_node
    across = np.where(node[:, None] != node, traffic, 0)
    # Step 2: the home of every tile; the tiles of a block are neighbours.
    tile_home = np.repeat(plan.geometry.block_worker, plan.head_groups.shards)
    return PoolReplay(
        cost=cost,
        workers_before=imbalance(home),
        workers_after=imbalance(load),
        load=float(load.sum()),
        busiest_home=float(home.max()),
        busiest=float(load.max()),
        moved_bytes=float(traffic.sum()),
        across_bytes=float(across.sum()),
        worst_sent=float(traffic.sum(axis=1).max()),
        worst_received=float(traffic.sum(axis=0).max()),
        worst_across=float(max(across.sum(axis=1).max(), across.sum(axis=0).max())),
        tiles=float(len(plan.assignment)),
        moved_tiles=float(np.count_nonzero(plan.assignment != tile_home)),
        planning_seconds=planning_seconds,
    )


def _step_imbalance(busiest: FloatArray, mean: FloatArray, per_index: int) -> float:
    """Steps imbalance of pools in the order of emission, `per_index` of which share a GA index.

    `busiest` and `mean` [pools] are the loads of each pool's busiest and mean worker.
    """
    # Loads 5 3 2 4, two pools an index: the slowest are 5 and 4.
    equal = float(mean.mean())
    slowest = busiest.reshape(-1, per_index).max(axis=1)
    return float(slowest.mean()) / equal - 1.0 if equal else 0.0
