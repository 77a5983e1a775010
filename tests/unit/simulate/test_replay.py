"""A replay places and plans as training does, and its figures are those of the plans."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import libra
from libra.config import HeadShape, PoolConfig
from libra.data.packing import Packs
from libra.data.pools import PackPlacement
from libra.data.sampler import PoolSampler
from libra.plan.traffic import held_for_others, pool_traffic
from libra.simulate.figures import POOL_FIGURES, CandidateFigures
from libra.simulate.replay import Candidate, replay
from libra.simulate.sample import sample_windows
from libra.simulate.window import (
    WindowTask,
    emitted_pools,
    plan_figures,
)
from tests.pools import SmallPool, small_pools
from tests.unit.simulate.measures import busy_workers, takes_a_name

LENGTHS = Path(__file__).parents[2] / "data" / "lengths-code.npy"
HEADS = HeadShape(8, 2, 16)
CANDIDATES = [Candidate(2, 256, 1), Candidate(4, 256, 2)]


def cut(packs: Packs, global_batch: int) -> list[Packs]:
    """Whole windows of a packed corpus."""
    windows = []
    for first in range(0, len(packs) - global_batch + 1, global_batch):
        low, high = packs.offsets[first], packs.offsets[first + global_batch]
        windows.append(
            Packs(
                tokens=packs.tokens,
                lengths=packs.lengths[low:high],
                offsets=packs.offsets[first : first + global_batch + 1] - low,
                samples=packs.samples[low:high],
                starts=packs.starts[low:high],
            )
        )
    return windows


def small_corpus() -> Packs:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.3, 700).astype(np.int64) + 1
    return libra.pack_best_fit(lengths, 4096, longer="drop")


WINDOWS = cut(small_corpus(), 16)


def settled(figures: CandidateFigures) -> dict[str, object]:
    """Everything but the time that planning took."""
    plain = figures.as_dict(windows=True)
    plain.pop("planning_seconds")
    for window in plain["windows"]:
        window["pools"].pop("planning_seconds")
    return plain


@pytest.mark.parametrize(
    "placement, refine, order",
    [
        ("vrsp", True, "grouped"),
        ("vrsp", True, "uniform"),
        ("vrsp", False, "index"),
        ("contiguous", False, "index"),
    ],
)
def test_pools_are_those_of_the_sampler(placement: PackPlacement, refine: bool, order: str) -> None:
    schedule = PoolSampler(
        small_corpus(),
        global_batch=16,
        dp_rank=0,
        dp_size=8,
        pool_size=2,
        shuffle=False,
        placement=placement,
        refine=refine,
        order=order,  # type: ignore[arg-type]
    ).schedule()
    found = []
    for window in WINDOWS:
        task = WindowTask(
            window=0,
            tokens=window.tokens,
            lengths=window.lengths,
            offsets=window.offsets,
            candidate=Candidate(2, 256, 1),
            config=PoolConfig(pool_size=2),
            heads=HEADS,
            cp_size=2,
            dp_size=8,
            placement=placement,
            refine=refine,
            order=order,  # type: ignore[arg-type]
            measure=None,
        )
        found.append(emitted_pools(task, window.workloads).reshape(2, 8) + 16 * len(found))
    assert np.concatenate(found).tolist() == schedule.tolist()


def test_figures_of_a_window_are_those_of_its_plans() -> None:
    config = PoolConfig(tolerance=0.0, ranks_per_node=2)
    (found,) = replay(WINDOWS, [Candidate(4, 256, 2)], cp_size=2, heads=HEADS, config=config)
    window, packs = found.windows[1], WINDOWS[1]
    weights = packs.workloads
    pools = libra.refine_pools(weights, libra.place_packs(weights, 4))
    pools = libra.order_pools(weights, pools, 4)
    plans = [
        libra.plan_pool(
            [packs.cu_seqlens(pack) for pack in members],
            cp_size=2,
            config=config.replace(pool_size=4, block_size=256, head_shards=2),
            heads=HEADS,
            tokens=packs.tokens,
        )
        for members in pools.tolist()
    ]
    assert window.pools["workers_after"].tolist() == pytest.approx([p.imbalance for p in plans])
    traffic = [plan.traffic.sum(axis=0) for plan in plans]
    assert window.pools["moved_bytes"].tolist() == [t.sum() for t in traffic]
    assert window.pools["worst_sent"].tolist() == [t.sum(axis=1).max() for t in traffic]
    assert window.pools["worst_received"].tolist() == [t.sum(axis=0).max() for t in traffic]
    within = [sum(t[i : i + 2, i : i + 2].sum() for i in range(0, 8, 2)) for t in traffic]
    assert window.pools["across_bytes"].tolist() == [
        t.sum() - w for t, w in zip(traffic, within, strict=True)
    ]
    loads = weights[pools].sum(axis=1)
    assert window.pools_after == pytest.approx(loads.max() / loads.mean() - 1)
    contiguous = weights.reshape(-1, 4).sum(axis=1)
    assert window.pools_before == pytest.approx(contiguous.max() / contiguous.mean() - 1)
    assert window.heaviest_pack == weights.max() / weights.mean()
    assert window.pools_above_bound < 0.05
    # one gradient-accumulation index: the busiest worker of all
    every = np.concatenate([plan.load for plan in plans])
    assert window.steps_after == pytest.approx(every.max() / every.mean() - 1)
    assert found["workers_after"].most == max(w.pools["workers_after"].max() for w in found.windows)
    assert found["pools_after"].mean == pytest.approx(
        np.mean([each.pools_after for each in found.windows])
    )


def test_steps_are_sums_over_gradient_accumulation_indices() -> None:
    (found,) = replay(WINDOWS[:1], [Candidate(2, 256, 1)], cp_size=2, heads=HEADS, dp_size=4)
    window, packs = found.windows[0], WINDOWS[0]
    pairs = np.array([sum(n * (n + 1) // 2 for n in lengths.tolist()) for lengths in packs])
    slowest = pairs.reshape(4, 4).max(axis=1)
    assert window.steps_before == pytest.approx(slowest.sum() / (pairs.mean() * 4) - 1)
    busiest = window.pools["busiest"].reshape(4, 2).max(axis=1)
    mean = pairs.mean() * HEADS.q / 2  # of a worker at one index
    assert window.steps_after == pytest.approx(busiest.sum() / (4 * mean) - 1)
    assert 0 <= window.steps_after < window.steps_before


@given(small_pools(placements=("surplus", "paper", "ulysses")))
@settings(max_examples=60, deadline=None)
def test_extra_memory_and_loads_are_the_tallys(pool: SmallPool) -> None:
    plan = pool.plan()
    assert held_for_others(plan).tolist() == pool_traffic(plan).extra_memory.tolist()
    figures = plan_figures(plan)
    assert set(figures) == set(POOL_FIGURES) - {"planning_seconds"}
    assert figures["load"] == plan.load.sum() and figures["busiest"] == plan.load.max()
    assert figures["moved_bytes"] == plan.traffic.sum()


def test_every_placement_can_be_replayed_ulysses_among_them() -> None:
    for placement, size in (("ulysses", 1), ("paper", 4)):
        config = PoolConfig(pool_size=size, placement=placement)  # type: ignore[arg-type]
        (found,) = replay(
            WINDOWS[:2],
            [Candidate(size, 256, 1)],
            cp_size=2,
            heads=HEADS,
            config=config,
            pack_placement="contiguous",
            dp_size=8,
        )
        if placement == "ulysses":
            assert found["workers_after"].most < 1e-12
            assert found["steps_after"].mean == pytest.approx(found["steps_before"].mean)


def test_processes_find_what_one_finds_and_tell_their_progress() -> None:
    ticks: list[tuple[int, int | None]] = []
    arguments = {"cp_size": 2, "heads": HEADS, "measure": busy_workers}
    alone = replay(WINDOWS, CANDIDATES, **arguments)  # type: ignore[arg-type]
    shared = replay(
        iter(WINDOWS),
        CANDIDATES,
        workers=2,
        progress=lambda done, total: ticks.append((done, total)),
        **arguments,  # type: ignore[arg-type]
    )
    assert [settled(each) for each in shared] == [settled(each) for each in alone]
    assert ticks == [(i + 1, None) for i in range(2 * len(WINDOWS))]
    assert alone[0]["busy_workers"].most == 4
    assert [each.candidate for each in alone] == CANDIDATES


def test_a_sample_reads_its_windows_only_and_bounds_the_corpus() -> None:
    lengths = np.load(LENGTHS)
    windows = cut(libra.pack_sequential(lengths, 8192, longer="drop"), 64)
    skew = [each.workloads.max() / each.workloads.mean() for each in windows]
    candidate, arguments = Candidate(4, 1024, 1), {"cp_size": 1, "heads": HeadShape(4, 1, 8)}
    (whole,) = replay(windows[:120], [candidate], **arguments)  # type: ignore[arg-type]
    sample = sample_windows(skew[:120], 24, seed=3)
    read = 0

    def counted() -> Iterator[Packs]:
        nonlocal read
        for each in windows:
            read += 1
            yield each

    ticks: list[int | None] = []
    (part,) = replay(
        counted(),
        [candidate],
        sample=sample,
        progress=lambda done, total: ticks.append(total),
        **arguments,  # type: ignore[arg-type]
    )
    assert [each.window for each in part.windows] == sample.windows.tolist()
    assert read == sample.windows[-1] + 1 and ticks == [24] * 24
    assert part.corpus_windows == 120
    for name in ("pools_before", "pools_after", "moved_bytes", "steps_before"):
        inside = part[name].low <= whole[name].mean <= part[name].high
        near = part[name].mean == pytest.approx(whole[name].mean, rel=0.1)
        assert inside or near
        assert whole[name].low == whole[name].mean == whole[name].high


@pytest.mark.parametrize(
    "candidates, changes, message",
    [
        ([], {}, "no candidate"),
        ([Candidate(2, 256, 1), Candidate(3, 256, 1)], {}, r"P=3 B=256 H=1.*16 packs"),
        ([Candidate(2, 256, 3)], {}, r"P=2 B=256 H=3: 8 query heads"),
        ([Candidate(2, 256, 4)], {}, r"P=2 B=256 H=4: .*chunks"),
        ([Candidate(2, 0, 1)], {}, r"P=2 B=0 H=1: .*block_size"),
        ([Candidate(0, 256, 1)], {}, r"P=0"),
        ([Candidate(2, 256, 1)] * 2, {}, "given twice"),
        ([Candidate(4, 256, 1)], {"dp_size": 2}, r"P=4 .*dp_size=2"),
        ([Candidate(2, 256, 1)], {"dp_size": 6}, "dp_size=6 does not divide"),
        ([Candidate(2, 256, 1)], {"cp_size": 0}, "cp_size"),
        ([Candidate(2, 256, 1)], {"workers": 0}, "workers"),
        ([Candidate(2, 256, 1)], {"windows": []}, "no window"),
        ([Candidate(2, 256, 1)], {"measure": takes_a_name}, "'load'"),
        (
            [Candidate(2, 256, 1)],
            {"sample": sample_windows(np.arange(1000), 999)},
            "window .* the corpus does not have",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(
    candidates: list[Candidate], changes: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {"windows": WINDOWS, "cp_size": 2, "heads": HEADS, **changes}
    with pytest.raises(ValueError, match=message):
        replay(arguments.pop("windows"), candidates, **arguments)  # type: ignore[arg-type]


def test_windows_are_read_as_they_are_needed() -> None:
    done = 0

    def endless() -> Iterator[Packs]:
        for number in itertools.count():
            assert number <= done + 1
            yield WINDOWS[number % len(WINDOWS)]

    class EnoughError(Exception):
        pass

    def stop_later(count: int, total: int | None) -> None:
        nonlocal done
        done = count
        if count == 5:
            raise EnoughError

    with pytest.raises(EnoughError):
        replay(endless(), CANDIDATES[:1], cp_size=2, heads=HEADS, progress=stop_later)


@pytest.mark.parametrize("tokens, global_batch, cp_size", [(2**18, 128, 8), (2**20, 32, 16)])
def test_a_candidate_on_real_lengths_takes_at_most_three_seconds(
    tokens: int, global_batch: int, cp_size: int
) -> None:
    windows = cut(libra.pack_sequential(np.load(LENGTHS), tokens, longer="drop"), global_batch)
    arguments = {"cp_size": cp_size, "heads": HeadShape(128, 16, 256)}
    replay(windows[:1], [Candidate(8, 4096, 1)], **arguments)  # type: ignore[arg-type]
    begin = time.process_time()
    (found,) = replay(windows, [Candidate(8, 4096, 1)], **arguments)  # type: ignore[arg-type]
    assert time.process_time() - begin <= 3
    assert found["pools_before"].mean == pytest.approx(
        {2**18: 0.8001, 2**20: 0.5932}[tokens], abs=1e-4
    )
    assert found["workers_after"].most <= 0.03


def test_candidates_read_well() -> None:
    assert str(Candidate(8, 4096, 2)) == "P=8 B=4096 H=2"
    assert dataclasses.astuple(Candidate(8, 4096, 2)) == (8, 4096, 2)
