"""The paper's planner as one would do it by hand: token by token, nothing but loops and exact
fractions.

Slow and obvious on purpose.  It shares no code with `libra.plan`, so that the two can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from libra.config import HeadShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPlan:
    """What the planner decides, and what follows from it."""

    assignment: list[int]
    """Worker of each tile."""
    load: list[int]
    """Query-key pairs times heads of each worker."""
    bytes_q: int
    bytes_kv: int
    bytes_o: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One block of one pack for one head shard."""

    home: int
    """The worker that holds its queries."""
    queries: int
    cost: int
    """f: causal query-key pairs times heads."""
    groups: list[tuple[int, int]]
    """(sample, key/value head) of all K and V that it reads; samples are counted over the pool."""


def shard_holders(tokens: int, cp_size: int, layout: str) -> list[int]:
    """Context-parallel rank that holds each token of a pack.

    The pack is cut into runs whose lengths differ by at most one, longer runs first: one run a
    rank, or for zigzag two, of which rank r holds the r-th from either end.
    """
    runs = list(range(cp_size))
    if layout == "zigzag":
        runs += runs[::-1]
    size, longer = divmod(tokens, len(runs))
    holders: list[int] = []
    for i, rank in enumerate(runs):
        holders += [rank] * (size + (i < longer))
    return holders


def slow_plan(
    packs: list[list[int]],
    *,
    tokens: int,
    cp_size: int,
    block_size: int,
    head_shards: int,
    tolerance: float,
    heads: HeadShape,
    layout: str = "contiguous",
) -> SlowPlan:
    """Place every tile of a pool by the paper's greedy.

    `packs` holds each pack's sample bounds, `tokens` is L.  `tolerance` is taken exactly as the
    float says.
    """
    holders = shard_holders(tokens, cp_size, layout)
    held = count_held(packs, holders, cp_size)
    tiles = cut_tiles(packs, holders, cp_size, block_size, head_shards, heads)
    workers = len(packs) * cp_size
    row_k, row_v = heads.dim * heads.bytes, heads.value_dim * heads.bytes
    target = (1 + Fraction(tolerance)) * sum(tile.cost for tile in tiles) / workers

    assignment = [tile.home for tile in tiles]
    load = [0] * workers
    fetched: list[set[tuple[int, int]]] = [set() for _ in range(workers)]
    bytes_q = bytes_kv = bytes_o = 0
    for i in sorted(range(len(tiles)), key=lambda i: (-tiles[i].cost, i)):
        tile = tiles[i]
        if tile.queries == 0:  # padding: nothing to compute and nothing to move
            continue
        rows = tile.queries * heads.q // head_shards
        kv, q, o = [], [], []
        for worker in range(workers):
            absent = [
                sum(held[sample]) - held[sample][worker]
                for sample, head in tile.groups
                if (sample, head) not in fetched[worker]
            ]
            away = rows if worker != tile.home else 0
            kv.append(sum(absent) * (row_k + row_v))
            q.append(away * row_k)
            o.append(away * row_v)
        delta = [kv[w] + q[w] + o[w] for w in range(workers)]
        room = [w for w in range(workers) if load[w] + tile.cost <= target]
        if room:
            chosen = min(room, key=lambda w: (delta[w], load[w], w))
        else:
            chosen = min(range(workers), key=lambda w: (load[w], delta[w], w))
        assignment[i] = chosen
        load[chosen] += tile.cost
        fetched[chosen].update(tile.groups)
        bytes_q, bytes_kv, bytes_o = bytes_q + q[chosen], bytes_kv + kv[chosen], bytes_o + o[chosen]
    return SlowPlan(
        assignment=assignment, load=load, bytes_q=bytes_q, bytes_kv=bytes_kv, bytes_o=bytes_o
    )


def cut_tiles(
    packs: list[list[int]],
    holders: list[int],
    cp_size: int,
    block_size: int,
    head_shards: int,
    heads: HeadShape,
) -> list[Tile]:
    """All tiles by ID: (pack * blocks + block) * H + shard."""
    tokens, width = len(holders), heads.q // head_shards
    cuts = [
        t for t in range(tokens) if t % block_size == 0 or t == 0 or holders[t] != holders[t - 1]
    ]
    tiles = []
    for p, samples in enumerate(sample_tables(packs)):
        for start, stop in zip(cuts, [*cuts[1:], tokens], strict=True):
            queries = [samples[t] for t in range(start, stop) if t in samples]
            touched = sorted({sample for sample, _ in queries})
            pairs = sum(position + 1 for _, position in queries)
            for shard in range(head_shards):
                shard_heads = range(shard * width, (shard + 1) * width)
                kv_heads = sorted({head // (heads.q // heads.kv) for head in shard_heads})
                tiles.append(
                    Tile(
                        home=p * cp_size + holders[start],
                        queries=len(queries),
                        cost=pairs * width,
                        groups=[(sample, head) for sample in touched for head in kv_heads],
                    )
                )
    return tiles


def sample_tables(packs: list[list[int]]) -> list[dict[int, tuple[int, int]]]:
    """For each pack, token -> (sample, position in the sample); padding tokens are absent.  Samples
    are counted over the pool.
    """
    tables, sample = [], 0
    for bounds in packs:
        table = {}
        for start, stop in pairwise(bounds):
            for token in range(start, stop):
                table[token] = (sample, token - start)
            sample += 1
        tables.append(table)
    return tables


def count_held(packs: list[list[int]], holders: list[int], cp_size: int) -> list[list[int]]:
    """Tokens of each sample that each worker holds, [samples][workers]."""
    workers = len(packs) * cp_size
    held = [[0] * workers for bounds in packs for _ in bounds[1:]]
    for p, table in enumerate(sample_tables(packs)):
        for token, (sample, _) in table.items():
            held[sample][p * cp_size + holders[token]] += 1
    return held
