"""What ranks really send each other, and hold for it, is what the plan and its traffic say, byte by
byte.
"""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import libra
from libra.cost.attention_time import moved_bytes
from libra.cost.kernel_table import Direction
from libra.plan.memory import pool_memory
from libra.plan.plan_pool import plan_pool
from libra.plan.pool_plan import PoolPlan
from libra.plan.traffic import PoolTraffic, pool_traffic
from tests.distributed.cases import Case, make_pack, make_pool, my_rows
from tests.distributed.meter import Meter, Step, metered
from tests.distributed.ranks import RankPool

TOKENS = 101  # shards of unequal length
LONG, SHORT, PADDED, HALF = [0, TOKENS], [*range(0, TOKENS, 9), TOKENS], [0, 7, 40], [0, 50, TOKENS]
SHAPES = ("surplus", 1), ("surplus", 2), ("paper", 1), ("paper", 2), ("ulysses", 2), ("ulysses", 4)
"""Placement and CP, on four ranks."""
GROUPED, MULTI_QUERY = (8, 4, 4, 8), (8, 1, 8, 4)
"""Heads whose K and V travel with each chunk, and those that all chunks read from the first."""


def metered_call(rank: int, world_size: int, case: Case) -> Meter:
    """Forward and backward of one layer."""
    pool = make_pool(world_size, case.cp, case.config)
    rows = my_rows(case, rank % case.cp)
    *qkv, dout = (tensor[rows] for tensor in make_pack(case, rank // case.cp))
    qkv = [tensor.requires_grad_() for tensor in qkv]
    with pool.microbatch(case.bounds[rank // case.cp], tokens=case.tokens), metered() as meter:
        torch.autograd.grad(libra.libra_attention(*qkv), qkv, dout)
    pool.close()
    return meter


def make_plan(case: Case, pool: int) -> PoolPlan:
    """The plan that the ranks of a pool make for themselves."""
    hq, hkv, dim, value_dim = case.heads
    size = case.config.pool_size
    return plan_pool(
        case.bounds[pool * size : (pool + 1) * size],
        cp_size=case.cp,
        config=case.config,
        heads=libra.HeadShape(hq, hkv, dim, case.dtype.itemsize, value_dim),
        tokens=case.tokens,
    )


def chunks_of(step: Step, plan: PoolPlan) -> list[int]:
    """The chunk of each message of a step, in the order of posting on a CPU."""
    chunks = range(plan.head_groups.chunks)
    done = plan.head_groups.kv_done
    queries = int(plan.moved_rows[0].any())  # a message that no worker needs is not posted
    moved = plan.kv_transfers.rows(plan.workers, plan.head_groups.chunks).any(axis=(2, 3))
    keys, multicast = 2 * moved
    fetched = [
        [chunk] * (keys[chunk] + queries + (chunk == 0) * multicast[chunk]) for chunk in chunks
    ]
    later = [chunk for chunk in chunks[1:] for _ in range(multicast[chunk])]
    refetch = plan.config.backward == "refetch"
    dout = [[chunk] * queries + fetched[chunk] * refetch for chunk in chunks]
    home: list[int] = []
    due: list[int] = []
    for chunk in chunks:
        buffers = [buffer for buffer in chunks if done[buffer] == chunk]
        home += due  # sums that first readers collected after the chunk before
        home += [chunk for buffer in buffers for _ in range(multicast[buffer])]  # to first readers
        home += [chunk] * queries  # dQ
        home += [chunk for buffer in buffers if not multicast[buffer] for _ in range(keys[buffer])]
        due = [chunk for buffer in buffers if multicast[buffer] for _ in range(keys[buffer])]
    return {
        ("forward", "dispatch"): [*chain(*fetched), *later],
        ("forward", "return"): list(chunks) * queries,
        ("backward", "dispatch"): [*chain(*dout), *later * refetch],
        ("backward", "return"): home + due,
    }[step]


def by_chunk(
    messages: dict[Step, list[list[int]]], step: Step, plan: PoolPlan
) -> NDArray[np.int64]:
    """A step's messages added up by chunk, [chunks, workers]."""
    total = np.zeros((plan.head_groups.chunks, plan.workers), dtype=np.int64)
    for chunk, counts in zip(chunks_of(step, plan), messages.get(step, []), strict=True):
        total[chunk] += counts
    return total


def planned(traffic: PoolTraffic) -> dict[Step, NDArray[np.int64]]:
    directions: tuple[Direction, ...] = ("forward", "backward")
    return {
        (direction, way): moved
        for direction in directions
        for way, moved in zip(("dispatch", "return"), moved_bytes(traffic, direction), strict=True)
    }


def check(ranks: RankPool, case: Case) -> PoolPlan:
    """Every rank moved and held what its pool's traffic says; the plan of the first pool."""
    workers = case.config.pool_size * case.cp
    for rank, meter in enumerate(ranks.run(metered_call, case)):
        pool, worker = divmod(rank, workers)
        plan = make_plan(case, pool)
        traffic = pool_traffic(plan)
        for step, moved in planned(traffic).items():
            sent = by_chunk(meter.sent, step, plan)
            received = by_chunk(meter.received, step, plan)
            assert (sent == moved[:, worker]).all(), step
            assert (received == moved[:, :, worker]).all(), step
            assert not sent[:, worker].any()
            assert not received[:, worker].any()
        for direction, traffic in (
            ("forward", plan.traffic),
            ("backward", plan.backward_traffic),
        ):
            every = [meter.sent.get((direction, way), []) for way in ("dispatch", "return")]
            sent = np.sum([*chain(*every), [0] * workers], axis=0)
            assert sent.tolist() == traffic.sum(axis=0)[worker].tolist()
        assert meter.kept == pool_memory(plan).kept[worker]
    return make_plan(case, 0)


def case_of(placement: Any, cp: int, **changes: Any) -> Case:
    pool_size = 1 if placement == "ulysses" else 4 // cp
    return Case(
        bounds=[LONG, SHORT, PADDED, HALF][: 4 // cp],
        tokens=TOKENS,
        cp=cp,
        config=libra.PoolConfig(
            pool_size=pool_size,
            block_size=16,
            head_shards=1,
            chunks=2,
            placement=placement,
            shard_layout=changes.pop("layout", "contiguous"),
            backward=changes.pop("backward", "retain"),
            ranks_per_node=changes.pop("ranks_per_node", 8),
        ),
        **{"heads": GROUPED, "dtype": torch.float32, **changes},
    )


@pytest.mark.parametrize("placement, cp", SHAPES)
def test_ranks_move_what_the_tally_counts_and_nothing_local(
    ranks4: RankPool, placement: str, cp: int
) -> None:
    for layout, backward in product(("contiguous", "zigzag"), ("retain", "refetch")):
        case = case_of(placement, cp, layout=layout, backward=backward)
        plan = check(ranks4, case)
        assert plan.traffic.any(axis=(1, 2)).all()


@pytest.mark.parametrize("placement, cp", SHAPES)
def test_also_where_all_chunks_read_the_same_keys_in_half_precision(
    ranks4: RankPool, placement: str, cp: int
) -> None:
    for backward in ("retain", "refetch"):
        case = case_of(placement, cp, backward=backward, heads=MULTI_QUERY, dtype=torch.bfloat16)
        traffic = pool_traffic(check(ranks4, case))
        # K and V come with the first chunk; their gradients return once the last has added to them.
        assert traffic.dispatched[0].sum() > traffic.dispatched[1].sum()
        assert traffic.backward_returned[1].sum() > traffic.backward_returned[0].sum()


@pytest.mark.parametrize("heads", [GROUPED, MULTI_QUERY])
@pytest.mark.parametrize("cp", [1, 2])
def test_also_where_rows_are_passed_on(
    ranks4: RankPool, cp: int, heads: tuple[int, int, int, int]
) -> None:
    for layout, backward in product(("contiguous", "zigzag"), ("retain", "refetch")):
        plan = check(
            ranks4,
            case_of("surplus", cp, layout=layout, backward=backward, heads=heads, ranks_per_node=1),
        )
        assert plan.kv_transfers.passed_on.any()


def test_where_nothing_moves_nothing_is_sent_or_held(ranks4: RankPool) -> None:
    case = case_of("surplus", 1)
    still = Case(
        bounds=[SHORT] * 4, tokens=TOKENS, heads=GROUPED, dtype=torch.float32, config=case.config
    )
    plan = check(ranks4, still)
    assert not plan.traffic.any()
    assert [meter.exchanges for meter in ranks4.run(metered_call, still)] == [0] * 4
