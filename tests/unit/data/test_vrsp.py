"""VRSP: exact pools of like load, with the figures that are expected of real lengths."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from libra.data.packing import pack_sequential
from libra.data.vrsp import contiguous_pools, imbalance, place_packs, pool_loads

DATA = Path(__file__).parents[2] / "data"


def reference_pools(workloads: list[int], pool_size: int) -> list[list[int]]:
    """VRSP as one would do it by hand: no heap, every pool looked at for every pack."""
    pools: list[list[int]] = [[] for _ in range(len(workloads) // pool_size)]
    for pack in sorted(range(len(workloads)), key=lambda i: (-workloads[i], i)):
        open_pools = [k for k, pool in enumerate(pools) if len(pool) < pool_size]
        least = min(open_pools, key=lambda k: (sum(workloads[i] for i in pools[k]), k))
        pools[least].append(pack)
    return pools


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], int]:
    """A window's workloads and a pool size that divides them; ties are common."""
    pool_size, pools = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    values = st.one_of(st.integers(0, 4), st.integers(0, 2**50))
    size = pool_size * pools
    return draw(st.lists(values, min_size=size, max_size=size)), pool_size


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


def test_the_worked_example_of_the_module() -> None:
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


def test_1024_packs_take_less_than_ten_milliseconds() -> None:
    window = np.random.default_rng(0).integers(1, 2**40, 1024)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        place_packs(window, 8)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010


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
