"""The recommendation: least step that fits, near ties to the smaller pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

import libra
from libra.simulate.recommend import rank_candidates, recommend
from libra.simulate.results import CandidateResult, Recommendation, SchemeResult
from tests.unit.simulate.study_example import study_example

CONFIG = libra.PoolConfig(pool_size=2)
EXAMPLE = study_example()


def candidate(pool_size: int, seconds: float, gigabytes: float = 50.0) -> CandidateResult:
    return replace(
        EXAMPLE.candidates[0],
        pool_size=pool_size,
        block_size=4096,
        head_shards=1,
        step_seconds=seconds,
        tokens_per_second=1e6 / seconds,
        memory_gigabytes=gigabytes,
        fits=gigabytes <= 80,
    )


def advise(
    *candidates: CandidateResult,
    config: libra.PoolConfig = CONFIG,
    schemes: tuple[SchemeResult, ...] = (),
) -> Recommendation:
    ranked = rank_candidates(candidates)
    chosen = config.replace(pool_size=candidates[ranked[0]].pool_size)
    return recommend(candidates, ranked, schemes, config=chosen, cap=80e9)


def test_the_fastest_that_fits_is_recommended_and_the_others_trail_it() -> None:
    advice = advise(candidate(2, 12), candidate(8, 10), candidate(16, 9, 90))
    assert advice.candidate == 1
    assert [each.candidate for each in advice.trailing] == [0, 2]
    assert advice.trailing[0].behind == pytest.approx(0.2)
    assert advice.line == (
        "libra.PoolConfig(pool_size=8, block_size=4096, head_shards=1, chunks=4)"
    )
    assert "Take P=8" in advice.text and "20.0% slower" in advice.text


def test_of_steps_within_half_a_percent_the_smaller_pool_wins() -> None:
    assert rank_candidates([candidate(16, 10.0), candidate(8, 10.04)]) == [1, 0]
    assert rank_candidates([candidate(16, 10.0), candidate(8, 10.06)]) == [0, 1]


def test_the_line_holds_settings_other_than_the_defaults() -> None:
    config = CONFIG.replace(placement="paper", chunks=2, shard_layout="zigzag")
    line = advise(candidate(4, 1), config=config).line
    assert line is not None
    assert eval(line, {"libra": libra}) == config.replace(pool_size=4)


def test_where_nothing_fits_it_says_what_is_missing() -> None:
    advice = advise(candidate(2, 12, 90), candidate(8, 10, 85))
    assert advice.line is None and advice.candidate is None
    assert "No candidate fits 80.0 GB: the smallest needs 85.0 GB" in advice.text


def test_a_scheme_that_beats_libra_is_named() -> None:
    libra_row = next(each for each in EXAMPLE.schemes if each.key == "libra")
    ulysses = next(each for each in EXAMPLE.schemes if each.key == "ulysses")
    faster = replace(ulysses, step_seconds=libra_row.step_seconds / 1.1)
    text = advise(candidate(4, 1), schemes=(faster, libra_row)).text
    assert text.endswith("In the compared windows Ulysses is 10.0% faster than Libra.")
    assert "faster" not in advise(candidate(4, 1), schemes=EXAMPLE.schemes).text
