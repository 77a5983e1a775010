"""Options of `libra bench`: refusals before any rank measures, and the windows of a corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from libra.bench.options import BenchOptions, check_options, read_windows
from libra.config import PoolConfig

LENGTHS = str(Path(__file__).parents[2] / "data" / "lengths-code.npy")


def options(**changes: object) -> BenchOptions:
    return BenchOptions(what="attention", lengths=LENGTHS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, world, message",
    [
        ({"cp": 3}, 2, "--cp 3 does not divide the 2 ranks"),
        ({"global_batch": 5}, 2, "--global-batch 5 is no multiple of 2 replicas"),
        ({"tokens": 0}, 2, "--tokens is 0"),
        ({"layers": 0}, 2, "--layers is 0"),
        ({"scheme": ()}, 2, "--scheme names no scheme"),
        ({"timeout": 0.0}, 2, "--timeout is 0"),
        ({"lengths": "-"}, 2, "standard input"),
        ({"kv_heads": 3}, 2, "kv must divide q"),
        ({"config": PoolConfig(pool_size=3)}, 4, "--config.pool-size 3 does not divide"),
        ({"config": PoolConfig(chunks=3)}, 2, "chunks"),
        ({"config": PoolConfig(pool_size=1, placement="ulysses")}, 2, "has no pools"),
        ({"heads": 6, "kv_heads": 2, "cp": 4, "global_batch": 4}, 4, "6"),
        ({"json": Path("no/such/folder/x.json")}, 2, "--json no/such/folder/x.json cannot"),
        ({"trace": Path()}, 2, "--trace . cannot be written"),
    ],
)
def test_options_that_no_rank_could_run_are_refused(changes, world, message) -> None:
    chosen = BenchOptions(what="attention", **{"lengths": LENGTHS} | changes)
    with pytest.raises(ValueError, match=message):
        check_options(chosen, world)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_defaults_run_on_any_small_number_of_ranks(world: int) -> None:
    check_options(options(), world)


def test_windows_are_the_first_of_the_corpus() -> None:
    one, two = read_windows(options(windows=1)), read_windows(options(windows=2))
    assert len(two) == 2 and len(two[0]) == 8
    assert (one[0].lengths == two[0].lengths).all()


def test_a_corpus_with_too_few_windows_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.full(20, 1000))
    few = BenchOptions(
        what="attention", lengths=str(tmp_path / "few.npy"), tokens=1000, global_batch=8, windows=3
    )
    with pytest.raises(ValueError, match="fills only 2 of 8 packs"):
        read_windows(few)
