"""Pools of a window: exact VRSP, refinement that is never worse, orders, and the bound."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import libra
from libra.data.packing import pack_sequential
from libra.data.pools import (
    bound,
    contiguous_pools,
    distance_to_bound,
    imbalance,
    make_pools,
    order_pools,
    place_packs,
    pool_loads,
    refine_pools,
)

DATA = Path(__file__).parents[2] / "data"
Window = tuple[list[int], int]


@st.composite
def windows(draw: st.DrawFn, most_packs: int = 48) -> Window:
    """A window's workloads and a pool size that divides them; ties are common."""
    pool_size = draw(st.integers(1, 6))
    pools = draw(st.integers(1, min(8, most_packs // pool_size)))
    values = st.one_of(st.integers(0, 4), st.integers(0, 100), st.integers(0, 2**50))
    size = pool_size * pools
    return draw(st.lists(values, min_size=size, max_size=size)), pool_size


def partitions(packs: tuple[int, ...], pool_size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to group the packs into pools."""
    if not packs:
        yield []
        return
    for others in combinations(packs[1:], pool_size - 1):
        rest = tuple(i for i in packs[1:] if i not in others)
        for pools in partitions(rest, pool_size):
            yield [(packs[0], *others), *pools]


def lognormal(packs: int, sigma: float, seed: int) -> NDArray[np.int64]:
    draws = np.random.default_rng(seed).lognormal(0, sigma, packs)
    return (draws * 1e9).astype(np.int64)


def descending(loads: NDArray[np.int64]) -> list[int]:
    return sorted(loads.tolist(), reverse=True)


# VRSP


def reference_pools(workloads: list[int], pool_size: int) -> list[list[int]]:
    """VRSP as one would do it by hand: no heap, every pool looked at for every pack."""
    pools: list[list[int]] = [[] for _ in range(len(workloads) // pool_size)]
    for pack in sorted(range(len(workloads)), key=lambda i: (-workloads[i], i)):
        open_pools = [k for k, pool in enumerate(pools) if len(pool) < pool_size]
        least = min(open_pools, key=lambda k: (sum(workloads[i] for i in pools[k]), k))
        pools[least].append(pack)
    return pools


@given(windows())
def test_pools_are_those_of_the_slow_reference(window: tuple[list[int], int]) -> None:
    workloads, pool_size = window
    assert place_packs(workloads, pool_size).tolist() == reference_pools(workloads, pool_size)


@given(windows())
def test_every_pack_is_in_one_pool_and_every_pool_has_p_packs(
    window: tuple[list[int], int],
) -> None:
    workloads, pool_size = window
    pools = place_packs(workloads, pool_size)
    assert pools.dtype == np.int64
    assert pools.shape == (len(workloads) // pool_size, pool_size)
    assert sorted(pools.ravel().tolist()) == list(range(len(workloads)))


@given(windows())
def test_loads_are_exact_and_keep_the_total(window: tuple[list[int], int]) -> None:
    workloads, pool_size = window
    loads = pool_loads(workloads, place_packs(workloads, pool_size))
    assert loads.dtype == np.int64
    assert sum(loads.tolist()) == sum(workloads)


def test_ties_go_to_the_first_pack_and_the_first_pool() -> None:
    assert place_packs([5, 5, 5, 5], 2).tolist() == [[0, 2], [1, 3]]


def test_the_worked_example_of_vrsp() -> None:
    window = [9, 7, 5, 4, 3, 2, 2, 1]
    pools = place_packs(window, 2)
    assert [[window[i] for i in pool] for pool in pools] == [[9, 1], [7, 2], [5, 2], [4, 3]]
    assert pool_loads(window, pools).tolist() == [10, 9, 7, 7]


def test_loads_beyond_the_integers_of_a_float_still_decide_exactly() -> None:
    big = 2**60
    assert place_packs([big + 1, big, 1, 0], 2).tolist() == [[0, 3], [1, 2]]


def test_floats_are_placed_like_the_same_integers() -> None:
    window = [9, 7, 5, 4, 3, 2, 2, 1]
    floats = np.array(window, dtype=np.float32) / 4
    assert place_packs(floats, 2).tolist() == place_packs(window, 2).tolist()
    assert pool_loads(floats, place_packs(floats, 2)).tolist() == [2.5, 2.25, 1.75, 1.75]


def test_one_pack_a_pool_and_one_pool_for_all_are_the_two_ends() -> None:
    assert place_packs([1, 3, 2], 1).tolist() == [[1], [2], [0]]
    assert place_packs([1, 3, 2], 3).tolist() == [[1, 2, 0]]


def test_contiguous_pools_keep_the_sampler_order() -> None:
    assert contiguous_pools(6, 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_imbalance_is_the_heaviest_over_the_mean_less_one() -> None:
    assert imbalance([2, 4, 6]) == 0.5
    assert imbalance([7, 7, 7]) == 0.0
    assert imbalance([0, 0]) == 0.0
    assert imbalance([2**62, 2**62, 2**62]) == 0.0  # the sum passes an int64


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: place_packs([], 1), "at least one pack"),
        (lambda: place_packs([1, 2, 3], 2), "window of 3 packs .*pool_size=2"),
        (lambda: place_packs([1, 2], 0), "pool_size is 0"),
        (lambda: place_packs([1, 2], 1.0), "pool_size is 1.0"),  # type: ignore[arg-type]
        (lambda: place_packs([1, -2], 1), r"workloads\[1\] is -2"),
        (lambda: place_packs([1.0, float("nan")], 1), r"workloads\[1\] is nan"),
        (lambda: place_packs([1.0, float("inf")], 1), r"workloads\[1\] is inf"),
        (lambda: place_packs([True, False], 1), "dtype bool"),
        (lambda: place_packs(["a"], 1), "dtype <U1"),
        (lambda: place_packs([2**70], 1), "fit an int64"),
        (lambda: place_packs(np.array([2**63], dtype=np.uint64), 1), "fit an int64"),
        (lambda: place_packs([[1, 2]], 1), r"shape \(1, 2\)"),
        (lambda: contiguous_pools(0, 1), "at least one pack"),
        (lambda: contiguous_pools(5, 2), "window of 5 packs"),
        (lambda: pool_loads([2**62, 2**62], contiguous_pools(2, 2)), r"may pass 2\^63"),
        (lambda: imbalance([]), "shape"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@cache
def code_packs(tokens: int) -> NDArray[np.int64]:
    """Workloads of the packs of real lengths in file order; samples longer than a pack dropped."""
    lengths = np.load(DATA / "lengths-code.npy", allow_pickle=False)
    return pack_sequential(lengths, tokens, longer="drop").workloads


def expected_figures() -> list[dict[str, str]]:
    with (DATA / "expected-vrsp.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "row", expected_figures(), ids=lambda r: f"{r['tokens']}-{r['global_batch']}-P{r['pool_size']}"
)
def test_the_code_corpus_gives_the_expected_figures_to_the_last_digit(row: dict[str, str]) -> None:
    workloads = code_packs(int(row["tokens"]))
    global_batch, pool_size = int(row["global_batch"]), int(row["pool_size"])
    windows = len(workloads) // global_batch
    before, after = [], []
    for window in workloads[: windows * global_batch].reshape(windows, global_batch):
        before.append(imbalance(pool_loads(window, contiguous_pools(global_batch, pool_size))))
        after.append(imbalance(pool_loads(window, place_packs(window, pool_size))))
    assert windows == int(row["windows"])
    assert f"{workloads.std() / workloads.mean():.3f}" == row["pack_cv"]
    assert f"{np.mean(before):.4f}" == row["before"]
    assert f"{np.mean(after):.4f}" == row["after"]


# Refinement


@given(windows(), st.booleans())
def test_refined_pools_are_never_worse_and_hold_the_same_packs(window: Window, vrsp: bool) -> None:
    workloads, pool_size = window
    start = place_packs if vrsp else lambda w, p: contiguous_pools(len(w), p)
    before = start(workloads, pool_size)
    after = refine_pools(workloads, before)
    assert after.dtype == np.int64
    assert after.shape == before.shape
    assert sorted(after.ravel().tolist()) == list(range(len(workloads)))
    old, new = pool_loads(workloads, before), pool_loads(workloads, after)
    assert descending(new) <= descending(old)  # first of all the heaviest
    assert sum(new.tolist()) == sum(old.tolist())


@given(windows(most_packs=24))
def test_no_single_swap_can_lighten_the_heavier_of_two_refined_pools(window: Window) -> None:
    workloads, pool_size = window
    pools = refine_pools(workloads, place_packs(workloads, pool_size))
    loads = pool_loads(workloads, pools).tolist()
    for heavy, light in permutations(range(len(pools)), 2):
        if loads[light] < loads[heavy]:
            for mine in pools[heavy].tolist():
                for theirs in pools[light].tolist():
                    surplus = workloads[mine] - workloads[theirs]
                    assert max(loads[heavy] - surplus, loads[light] + surplus) >= loads[heavy]


@given(windows(), st.randoms(use_true_random=False))
def test_rows_list_packs_heaviest_first_and_their_given_order_does_not_matter(
    window: Window, random: object
) -> None:
    workloads, pool_size = window
    pools = place_packs(workloads, pool_size)
    after = refine_pools(workloads, pools).tolist()
    assert after == [sorted(row, key=lambda i: (-workloads[i], i)) for row in after]
    shuffled = [row.copy() for row in pools.tolist()]
    for row in shuffled:
        random.shuffle(row)  # type: ignore[attr-defined]
    assert refine_pools(workloads, shuffled).tolist() == after


@given(st.lists(st.floats(0, 1e12), min_size=24, max_size=24))
def test_floats_are_never_worse_in_spite_of_rounding(workloads: list[float]) -> None:
    before = place_packs(workloads, 4)
    after = refine_pools(workloads, before)
    assert pool_loads(workloads, after).max() <= pool_loads(workloads, before).max()


def test_the_worked_example_of_the_refinement() -> None:
    window = [6, 5, 2, 1, 1, 1]
    refined = refine_pools(window, [[0, 2, 3], [1, 4, 5]])
    assert [[window[i] for i in pool] for pool in refined] == [[5, 2, 1], [6, 1, 1]]


def test_pools_that_no_swap_improves_come_back_unchanged() -> None:
    pools = place_packs([9, 7, 5, 4, 3, 2, 2, 1], 2)
    assert refine_pools([9, 7, 5, 4, 3, 2, 2, 1], pools).tolist() == pools.tolist()
    for lone in (place_packs([3, 1, 2], 1), place_packs([3, 1, 2], 3)):
        assert refine_pools([3, 1, 2], lone).tolist() == lone.tolist()


def test_four_percent_of_the_greedy_become_less_than_a_tenth_of_a_percent() -> None:
    left, gained = [], []
    for seed in range(20):
        window = lognormal(128, 0.8, seed)
        pools = place_packs(window, 8)
        gained.append(distance_to_bound(window, pools))
        left.append(distance_to_bound(window, refine_pools(window, pools)))
    assert np.mean(gained) > 0.02
    assert np.mean(left) < 0.0006
    assert max(left) < 0.002


def test_the_pools_are_pinned_so_that_a_checkpoint_outlives_upgrades() -> None:
    window = [4, 9, 2, 7, 7, 1, 12, 5, 3, 8, 6, 11]
    pools = refine_pools(window, contiguous_pools(12, 3))
    assert pools.tolist() == [[1, 9, 2], [4, 10, 7], [6, 0, 8], [11, 3, 5]]
    assert pool_loads(window, pools).tolist() == [19, 18, 19, 19]


@pytest.mark.parametrize("pool_size", [8, 64])
def test_1024_packs_are_placed_refined_and_ordered_within_ten_milliseconds(pool_size: int) -> None:
    window = lognormal(1024, 1.0, seed=0)
    times = []
    for _ in range(9):
        start = time.thread_time()  # CPU time: other processes don't count
        pools = refine_pools(window, place_packs(window, pool_size))
        order_pools(window, pools, 1024 // pool_size // 4)
        times.append(time.thread_time() - start)
    assert min(times) < 0.010


# The order of pools


def slowest(loads: NDArray[np.int64], pools_per_index: int) -> int:
    """The sum over indices of the slowest pool."""
    return int(loads.reshape(-1, pools_per_index).max(axis=1).sum())


@given(st.lists(st.integers(0, 30), min_size=6, max_size=6), st.sampled_from([1, 2, 3, 6]))
def test_grouped_makes_the_sum_of_the_slowest_as_small_as_any_order_can(
    loads: list[int], pools_per_index: int
) -> None:
    pools = order_pools(loads, np.arange(6).reshape(6, 1), pools_per_index, "grouped")
    best = min(slowest(np.array(p), pools_per_index) for p in permutations(loads))
    assert slowest(pool_loads(loads, pools), pools_per_index) == best


@given(windows())
def test_grouped_is_one_order_for_every_number_of_pools_at_an_index(window: Window) -> None:
    workloads, pool_size = window
    pools = place_packs(workloads, pool_size)
    orders = [
        order_pools(workloads, pools, n, "grouped").tolist()
        for n in range(1, len(pools) + 1)
        if len(pools) % n == 0
    ]
    assert all(order == orders[0] for order in orders)
    loads = pool_loads(workloads, np.array(orders[0])).tolist()
    assert loads == sorted(loads, reverse=True)


@pytest.mark.parametrize("pools_per_index", [2, 4, 8])
def test_uniform_gives_every_index_and_every_place_a_like_mix(pools_per_index: int) -> None:
    window = lognormal(256, 1.0, seed=1)
    pools = place_packs(window, 4)
    uniform, grouped = (
        pool_loads(window, order_pools(window, pools, pools_per_index, order)).reshape(
            -1, pools_per_index
        )
        for order in ("uniform", "grouped")
    )
    heaviest = descending(pool_loads(window, pools))[: len(uniform)]
    assert descending(uniform.max(axis=1)) == heaviest  # one at each index: no order is evener
    assert imbalance(uniform.sum(axis=1)) < 0.6 * imbalance(grouped.sum(axis=1))  # of an index
    assert imbalance(uniform.sum(axis=0)) < 0.75 * imbalance(grouped.sum(axis=0))  # of replicas


@given(windows(), st.sampled_from(["grouped", "uniform", "index"]))
def test_an_order_keeps_every_pool_as_it_is(window: Window, order: str) -> None:
    workloads, pool_size = window
    pools = place_packs(workloads, pool_size)
    ordered = order_pools(workloads, pools, len(pools), order)  # type: ignore[arg-type]
    assert sorted(ordered.tolist()) == sorted(pools.tolist())
    if order == "index":
        assert ordered.tolist() == pools.tolist()


def test_pools_of_equal_load_keep_their_order() -> None:
    pools = [[2, 3], [0, 1], [4, 5]]
    assert order_pools([1, 1, 1, 1, 2, 2], pools, 1).tolist() == [[4, 5], [2, 3], [0, 1]]


# The bound


@given(
    st.sampled_from([(6, 1), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3)]).flatmap(
        lambda shape: st.tuples(
            st.lists(st.integers(0, 40), min_size=shape[0], max_size=shape[0]), st.just(shape[1])
        )
    )
)
def test_no_placement_is_below_the_bound(window: Window) -> None:
    workloads, pool_size = window
    best = min(
        max(sum(workloads[i] for i in pool) for pool in pools)
        for pools in partitions(tuple(range(len(workloads))), pool_size)
    )
    least = bound(workloads, pool_size)
    assert type(least) is int
    assert least <= best
    ranked = sorted(workloads)
    assert least * len(workloads) >= sum(workloads) * pool_size  # the mean load
    assert least >= ranked[-1] + sum(ranked[: pool_size - 1])  # the heaviest pack's pool
    assert bound([float(w) for w in workloads], pool_size) <= best * (1 + 1e-12)


def test_two_heavy_packs_raise_the_bound_above_that_of_one() -> None:
    # Either they share a pool, 20 or more, or four more packs go with them: 20 + 0 + 3 + 3 + 3.
    assert bound([10, 10, 0, 3, 3, 3, 3, 3, 3], 3) == 15


def test_the_distance_to_the_bound_is_zero_for_the_best_placement() -> None:
    window = [10, 10, 0, 3, 3, 3, 3, 3, 3]
    assert distance_to_bound(window, [[0, 3, 2], [1, 4, 5], [6, 7, 8]]) == 16 / 15 - 1
    assert distance_to_bound([4, 3, 2, 1], [[0, 3], [1, 2]]) == 0.0
    assert distance_to_bound([0, 0], [[0], [1]]) == 0.0


# The edge


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: libra.refine_pools([], [[0]]), "at least one pack"),
        (lambda: libra.refine_pools([1, -1], [[0], [1]]), r"workloads\[1\] is -1"),
        (lambda: libra.refine_pools([1, 2], [0, 1]), r"pools has shape \(2,\)"),
        (lambda: libra.refine_pools([1, 2], [[0.0, 1.0]]), "dtype float64"),
        (lambda: libra.refine_pools([1, 2], [[0, 0]]), "each of 0 .. 1"),
        (lambda: libra.refine_pools([1, 2, 3], [[0, 1]]), "holds 2 indices"),
        (lambda: libra.refine_pools([2**62, 2**62], [[0, 1]]), r"may pass 2\^63"),
        (lambda: libra.order_pools([1, 2], [[0], [1]], 3), "2 pools .*pools_per_index=3"),
        (lambda: libra.order_pools([1, 2], [[0], [1]], 0), "pools_per_index is 0"),
        (lambda: libra.order_pools([1, 2], [[0], [2]], 1), "exactly once"),
        (
            lambda: libra.order_pools([1, 2], [[0], [1]], 1, "best"),  # type: ignore[arg-type]
            "order is 'best'; choose one of 'grouped', 'uniform', 'index'",
        ),
        (lambda: bound([1, 2, 3], 2), "window of 3 packs"),
        (lambda: bound([2**62, 2**62], 1), r"may pass 2\^63"),
        (lambda: distance_to_bound([1, 2], [[0, 0]]), "exactly once"),
    ],
)
def test_what_cannot_be_refined_is_refused_by_name(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# All steps at once


@pytest.mark.parametrize("order", ["grouped", "uniform", "index"])
@pytest.mark.parametrize("refine", [False, True])
def test_pools_are_placed_then_refined_then_ordered(refine: bool, order: Any) -> None:
    window = lognormal(32, 1.0, seed=0)
    pools = place_packs(window, 4)
    if refine:
        pools = refine_pools(window, pools)
    expected = order_pools(window, pools, 4, order)
    found = make_pools(window, 4, 4, refine=refine, order=order)
    assert found.tolist() == expected.tolist()


def test_contiguous_pools_keep_packs_in_their_order() -> None:
    window = lognormal(32, 1.0, seed=0)
    in_order = contiguous_pools(32, 4).tolist()
    assert make_pools(window, 4, 4, placement="contiguous").tolist() == in_order
