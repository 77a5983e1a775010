"""A replay places and plans as training does, and its figures are those of the plans."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import libra
from libra.config import PoolConfig
from libra.data.packing import Packs
from libra.simulate.predict import Setting
from libra.simulate.replay import CandidateReplay, replay
from libra.simulate.results import Candidate
from libra.simulate.sample import every_window, sample_windows
from tests.unit.simulate.small_cluster import CANDIDATES, WINDOWS, cut, make_setting

LENGTHS = Path(__file__).parents[2] / "data" / "lengths-code.npy"


def settled(found: CandidateReplay) -> dict[str, object]:
    """Everything but the time that planning took."""
    windows = [asdict(each) for each in found.windows]
    for window in windows:
        for pool in window["pools"]:
            del pool["planning_seconds"]
    estimates = {name: each for name, each in found.estimates.items() if name != "planning_seconds"}
    return {"candidate": found.candidate, "windows": windows, "estimates": estimates}


def replay_all(
    windows: list[Packs], candidates: Sequence[Candidate], setting: Setting
) -> list[CandidateReplay]:
    return replay(windows, candidates, setting, every_window(len(windows)))


def test_figures_of_a_window_are_those_of_its_plans() -> None:
    config = PoolConfig(tolerance=0.0, ranks_per_node=2)
    setting = make_setting(config)
    (found,) = replay_all(WINDOWS, [Candidate(4, 256, 2)], setting)
    window, packs = found.windows[1], WINDOWS[1]
    values = window.figures()
    weights = packs.workloads
    pools = libra.refine_pools(weights, libra.place_packs(weights, 4))
    pools = libra.order_pools(weights, pools, 4)
    plans = [
        libra.plan_pool(
            [packs.cu_seqlens(pack) for pack in members],
            cp_size=2,
            config=config.replace(pool_size=4, block_size=256, head_shards=2),
            heads=setting.heads,
            tokens=packs.tokens,
        )
        for members in pools.tolist()
    ]
    assert values["workers_after"] == pytest.approx([p.imbalance for p in plans])
    traffic = [plan.traffic.sum(axis=0) for plan in plans]
    assert values["moved_bytes"] == [t.sum() for t in traffic]
    assert values["worst_sent"] == [t.sum(axis=1).max() for t in traffic]
    assert values["worst_received"] == [t.sum(axis=0).max() for t in traffic]
    within = [sum(t[i : i + 2, i : i + 2].sum() for i in range(0, 8, 2)) for t in traffic]
    assert values["across_bytes"] == [t.sum() - w for t, w in zip(traffic, within, strict=True)]
    loads = weights[pools].sum(axis=1)
    assert window.pools_after == pytest.approx(loads.max() / loads.mean() - 1)
    contiguous = weights.reshape(-1, 4).sum(axis=1)
    assert window.pools_before == pytest.approx(contiguous.max() / contiguous.mean() - 1)
    assert window.heaviest_pack == weights.max() / weights.mean()
    assert window.pools_above_bound < 0.05
    # one gradient-accumulation index: the busiest worker of all
    every = np.concatenate([plan.load for plan in plans])
    assert window.steps_after == pytest.approx(every.max() / every.mean() - 1)
    worst = max(max(each.figures()["workers_after"]) for each in found.windows)
    assert found.estimates["workers_after"].most == worst
    assert found.estimates["pools_after"].mean == pytest.approx(
        np.mean([each.pools_after for each in found.windows])
    )


def test_steps_are_sums_over_gradient_accumulation_indices() -> None:
    setting = make_setting(dp=4)
    (found,) = replay_all(WINDOWS[:1], [Candidate(2, 256, 1)], setting)
    window, packs = found.windows[0], WINDOWS[0]
    pairs = np.array([sum(n * (n + 1) // 2 for n in lengths.tolist()) for lengths in packs])
    slowest = pairs.reshape(4, 4).max(axis=1)
    assert window.steps_before == pytest.approx(slowest.sum() / (pairs.mean() * 4) - 1)
    busiest = np.array(window.figures()["busiest"]).reshape(4, 2).max(axis=1)
    mean = pairs.mean() * setting.heads.q / 2  # of a worker at one index
    assert window.steps_after == pytest.approx(busiest.sum() / (4 * mean) - 1)
    assert 0 <= window.steps_after < window.steps_before


def test_every_placement_can_be_replayed_ulysses_among_them() -> None:
    for placement, size in (("ulysses", 1), ("paper", 4)):
        config = PoolConfig(pool_size=size, placement=placement)  # type: ignore[arg-type]
        # One accumulation index: the order of the pools changes nothing.
        (found,) = replay_all(WINDOWS[:2], [Candidate(size, 256, 1)], make_setting(config))
        if placement == "ulysses":
            assert found.estimates["workers_after"].most < 1e-12
            before, after = (found.estimates[f"steps_{when}"].mean for when in ("before", "after"))
            assert after == pytest.approx(before)


def test_processes_find_the_same_and_report_progress() -> None:
    ticks: list[tuple[int, int]] = []
    alone = replay_all(WINDOWS, CANDIDATES, make_setting())
    shared = replay(
        iter(WINDOWS),
        CANDIDATES,
        make_setting(),
        every_window(len(WINDOWS)),
        workers=2,
        progress=lambda done, total: ticks.append((done, total)),
    )
    assert [settled(each) for each in shared] == [settled(each) for each in alone]
    assert ticks == [(i + 1, 2 * len(WINDOWS)) for i in range(2 * len(WINDOWS))]
    assert [each.candidate for each in alone] == list(CANDIDATES)


def test_a_sample_reads_its_windows_only_and_bounds_the_corpus() -> None:
    lengths = np.load(LENGTHS)
    windows = cut(libra.pack_sequential(lengths, 8192, longer="drop"), 64)
    skew = [each.workloads.max() / each.workloads.mean() for each in windows]
    setting = make_setting(heads=(4, 1, 8), tokens=8192, global_batch=64, dp=64, cp=1)
    setting = replace(setting, config=setting.config.replace(chunks=1))
    candidate = Candidate(16, 1024, 1)
    (whole,) = replay_all(windows[:80], [candidate], setting)
    sample = sample_windows(skew[:80], 16, seed=3)
    read = 0

    def counted() -> Iterator[Packs]:
        nonlocal read
        for each in windows:
            read += 1
            yield each

    ticks: list[int] = []
    (part,) = replay(
        counted(),
        [candidate],
        setting,
        sample,
        progress=lambda done, total: ticks.append(total),
    )
    assert [each.window for each in part.windows] == sample.windows.tolist()
    assert read == sample.windows[-1] + 1 and ticks == [16] * 16
    for name in ("pools_before", "pools_after", "moved_bytes", "steps_before"):
        estimate, true = part.estimates[name], whole.estimates[name]
        inside = estimate.low <= true.mean <= estimate.high
        assert inside or estimate.mean == pytest.approx(true.mean, rel=0.1)
        assert true.low == true.mean == true.high


@pytest.mark.parametrize(
    "candidates, changes, message",
    [
        ([], {}, "no candidate"),
        ([Candidate(2, 256, 1), Candidate(3, 256, 1)], {}, r"P=3 B=256 H=1: .*dp=16"),
        ([Candidate(2, 256, 3)], {}, r"P=2 B=256 H=3: 8 query heads"),
        ([Candidate(2, 256, 4)], {}, r"P=2 B=256 H=4: .*chunks"),
        ([Candidate(2, 0, 1)], {}, r"P=2 B=0 H=1: .*block_size"),
        ([Candidate(0, 256, 1)], {}, r"P=0"),
        ([Candidate(2, 256, 1)] * 2, {}, "given twice"),
        ([Candidate(4, 256, 1)], {"setting": make_setting(dp=2)}, r"P=4 .*dp=2"),
        (
            [Candidate(2, 256, 1)],
            {"setting": make_setting(dp=8, global_batch=8)},
            "window 0 has 16 packs; they must be as many as global_batch=8",
        ),
        ([Candidate(2, 256, 1)], {"workers": 0}, "workers"),
        ([Candidate(2, 256, 1)], {"windows": []}, "wants window 0, which the corpus does not"),
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
    arguments: dict[str, object] = {
        "windows": WINDOWS,
        "setting": make_setting(),
        "sample": every_window(len(WINDOWS)),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        replay(candidates=candidates, **arguments)  # type: ignore[arg-type]


def test_windows_are_read_as_they_are_needed() -> None:
    done = 0

    def endless() -> Iterator[Packs]:
        for number in itertools.count():
            assert number <= done + 1
            yield WINDOWS[number % len(WINDOWS)]

    class EnoughError(Exception):
        pass

    def stop_later(count: int, total: int) -> None:
        nonlocal done
        done = count
        if count == 5:
            raise EnoughError

    with pytest.raises(EnoughError):
        replay(endless(), CANDIDATES[:1], make_setting(), every_window(1000), progress=stop_later)


@pytest.mark.parametrize("tokens, global_batch, cp_size", [(2**18, 128, 8), (2**20, 32, 16)])
def test_a_candidate_on_real_lengths_takes_at_most_three_seconds(
    tokens: int, global_batch: int, cp_size: int
) -> None:
    windows = cut(libra.pack_sequential(np.load(LENGTHS), tokens, longer="drop"), global_batch)
    setting = make_setting(
        heads=(128, 16, 256),
        tokens=tokens,
        global_batch=global_batch,
        dp=global_batch,
        cp=cp_size,
    )
    replay_all(windows[:1], [Candidate(8, 4096, 1)], setting)
    begin = time.process_time()
    (found,) = replay_all(windows, [Candidate(8, 4096, 1)], setting)
    assert time.process_time() - begin <= 3
    assert found.estimates["pools_before"].mean == pytest.approx(
        {2**18: 0.8001, 2**20: 0.5932}[tokens], abs=1e-4
    )
    assert found.estimates["workers_after"].most <= 0.03
