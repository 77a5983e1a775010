"""The table of candidates: every figure of each, sortable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from libra.simulate.report.reading import Number, Record, number, records, words
from libra.simulate.report.spelling import NONE, count, percent, seconds, short, three, tokens
from libra.simulate.report.summary import recommended


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    shown: str
    value: Number
    """What to sort by; None sorts last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRow:
    name: tuple[Cell, ...]
    cells: tuple[Cell, ...]
    status: str
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTable:
    headings: tuple[tuple[str, str], ...]
    """Short heading, and what it means."""

    rows: tuple[CandidateRow, ...]


_Spell = Callable[[float], str]
_NAME: tuple[tuple[str, str, str, _Spell], ...] = (
    ("pool_size", "P", "replicas in a pool", count),
    ("block_size", "B", "most query tokens in a tile", tokens),
    ("head_shards", "H", "head shards of a block", count),
)
_COLUMNS: tuple[tuple[str, str, str, _Spell], ...] = (
    ("step_seconds", "step", "predicted time of an optimizer step", seconds),
    ("behind", "behind", "how much slower than the fastest that fits", percent),
    ("tokens_per_second", "tokens/s", "throughput of the whole cluster", short),
    ("before", "pools before", "imbalance between pools in the sampler's order", percent),
    ("after", "pools after", "imbalance between pools after VRSP", percent),
    ("intra_mean", "inside", "imbalance inside a pool, mean", percent),
    ("intra_worst", "inside, worst", "imbalance inside a pool, worst", percent),
    ("gigabytes", "GB", "traffic of a pool, one layer forward", three),
    ("between_nodes_gigabytes", "GB between nodes", "the part that crosses nodes", three),
    ("worst_gigabytes", "GB worst worker", "sent or received by the busiest worker", three),
    (
        "extra_memory_gigabytes",
        "extra GB",
        "kept of other workers and for them by one call, and its workspace, worst worker",
        three,
    ),
    ("memory_gigabytes", "memory GB", "memory of a GPU", three),
    ("exposed_share", "exposed", "share of the step in transfers that nothing hides", percent),
    ("tiles", "tiles", "tiles of a pool's plan", count),
    ("plan_milliseconds", "plan ms", "time to plan a pool, one core", three),
)


def candidate_table(simulation: Record) -> CandidateTable:
    """One row a candidate, in the simulation's order; columns that nobody filled are left out."""
    candidates = records(simulation.get("candidates"))
    index, _ = recommended(simulation)
    fastest = min(
        (
            step
            for row in candidates
            if row.get("fits") is not False and (step := number(row.get("step_seconds")))
        ),
        default=None,
    )
    full = [
        dict(row) | {"behind": _behind(row, fastest), "worst_gigabytes": _worst(row)}
        for row in candidates
    ]
    columns = [c for c in _COLUMNS if any(number(row.get(c[0])) is not None for row in full)]
    return CandidateTable(
        headings=(
            *((short_name, meaning) for _, short_name, meaning, _ in (*_NAME, *columns)),
            ("status", "whether it fits the memory cap, or what is wrong"),
        ),
        rows=tuple(
            CandidateRow(
                name=tuple(_cell(row, key, spell) for key, _, _, spell in _NAME),
                cells=tuple(_cell(row, key, spell) for key, _, _, spell in columns),
                status=_status(row, best=i == index),
                best=i == index,
            )
            for i, row in enumerate(full)
        ),
    )


def _behind(row: Record, fastest: Number) -> Number:
    step = number(row.get("step_seconds"))
    return None if step is None or fastest is None else step / fastest - 1


def _worst(row: Record) -> Number:
    """Bytes through the busiest worker, in the direction that is busier."""
    ways = (number(row.get(f"{way}_worst_gigabytes")) for way in ("sent", "received"))
    return max((value for value in ways if value is not None), default=None)


def _cell(row: Record, key: str, spell: _Spell) -> Cell:
    value = number(row.get(key))
    return Cell(shown=NONE if value is None else spell(value), value=value)


def _status(row: Record, *, best: bool) -> str:
    problem = words(row.get("problem"))
    if problem:
        return problem
    if row.get("fits") is False:
        return "over the cap"
    if best:
        return "recommended"
    return "fits" if row.get("fits") is True else NONE
