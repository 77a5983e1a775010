"""The recommendation: least step that fits, near ties to the smaller pool."""

from __future__ import annotations

import pytest

import libra
from libra.simulate.figures import Candidate
from libra.simulate.recommend import Verdict, recommend
from libra.simulate.sample import Estimate

CONFIG = libra.PoolConfig(pool_size=2)


def verdict(pool_size: int, seconds: float, gigabytes: float = 50.0, cap: float = 80.0) -> Verdict:
    return Verdict(
        candidate=Candidate(pool_size, 4096, 1),
        step_seconds=Estimate(mean=seconds, low=seconds, high=seconds, most=seconds),
        tokens_per_second=1e6 / seconds,
        exposed_share=0.1,
        memory_bytes=gigabytes * 1e9,
        fits=gigabytes <= cap,
    )


def test_the_fastest_that_fits_is_recommended_and_the_others_trail_it() -> None:
    advice = recommend([verdict(2, 12), verdict(8, 10), verdict(16, 9, 90)], CONFIG, 80e9)
    assert advice.ranked == (1, 0, 2)
    assert advice.behind[1] == pytest.approx(0.2)
    assert advice.line == (
        "libra.PoolConfig(pool_size=8, block_size=4096, head_shards=1, chunks=4)"
    )
    assert "Take P=8" in advice.text and "20.0% slower" in advice.text


def test_of_steps_within_half_a_percent_the_smaller_pool_wins() -> None:
    assert recommend([verdict(16, 10.0), verdict(8, 10.04)], CONFIG, 80e9).ranked == (1, 0)
    assert recommend([verdict(16, 10.0), verdict(8, 10.06)], CONFIG, 80e9).ranked == (0, 1)


def test_the_line_holds_settings_other_than_the_defaults() -> None:
    config = CONFIG.replace(placement="paper", chunks=2, shard_layout="zigzag")
    line = recommend([verdict(4, 1)], config, 80e9).line
    assert line is not None
    assert eval(line, {"libra": libra}) == config.replace(pool_size=4)


def test_where_nothing_fits_it_says_what_is_missing() -> None:
    advice = recommend([verdict(2, 12, 90), verdict(8, 10, 85)], CONFIG, 80e9)
    assert advice.line is None
    assert "No candidate fits 80.0 GB: the smallest needs 85.0 GB" in advice.text
