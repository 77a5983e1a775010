"""What a user may choose, and what is refused with the field's name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from libra.config import HeadShape, PoolConfig, check_choice, check_count


@pytest.mark.parametrize("name", ["pool_size", "block_size", "head_shards", "chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None, np.int64(0)])
def test_a_count_must_be_an_integer_of_at_least_one(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"PoolConfig\.{name} is .*must be an integer >= 1"):
        PoolConfig(**{name: value})


@pytest.mark.parametrize("value", [-0.01, float("nan"), float("inf"), True, "0.03", None])
def test_the_tolerance_must_be_a_finite_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"PoolConfig\.tolerance is .*finite number >= 0"):
        PoolConfig(tolerance=value)


@pytest.mark.parametrize(
    "name, choices",
    [
        ("placement", "'surplus', 'paper', 'ulysses'"),
        ("shard_layout", "'contiguous', 'zigzag'"),
        ("backward", "'retain', 'refetch'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(name: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"PoolConfig.{name} is 'other'; choose one of {choices}"):
        PoolConfig(**{name: "other"})  # type: ignore[arg-type]


def test_ulysses_stays_inside_one_cp_group() -> None:
    with pytest.raises(ValueError, match="pool_size is 8; set pool_size=1"):
        PoolConfig(placement="ulysses")
    assert PoolConfig(placement="ulysses", pool_size=1).pool_size == 1


def test_a_changed_copy_is_validated_again() -> None:
    config = PoolConfig(chunks=2)
    assert config.replace(chunks=8) == PoolConfig(chunks=8)
    with pytest.raises(ValueError, match="chunks is 0"):
        config.replace(chunks=0)


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PoolConfig().chunks = 2  # type: ignore[misc]


def test_one_number_has_one_spelling() -> None:
    spellings = [PoolConfig(tolerance=value) for value in (0, 0.0, np.float64(0))]
    assert len({repr(config) for config in spellings}) == 1
    assert repr(PoolConfig(chunks=np.int64(4))) == repr(PoolConfig(chunks=4))
    assert repr(HeadShape(q=np.int64(4), kv=2, dim=8)) == repr(HeadShape(q=4, kv=2, dim=8))


@pytest.mark.parametrize("name", ["q", "kv", "dim", "bytes", "v_dim"])
@pytest.mark.parametrize("value", [0, -2, 2.0, True, "2"])
def test_a_head_count_must_be_an_integer_of_at_least_one(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"q": 4, "kv": 2, "dim": 8, name: value}
    with pytest.raises(ValueError, match=rf"HeadShape\.{name} is .*must be an integer >= 1"):
        HeadShape(**fields)


def test_kv_heads_must_divide_query_heads() -> None:
    with pytest.raises(ValueError, match="6 query heads over 4 key/value heads: kv must divide q"):
        HeadShape(q=6, kv=4, dim=8)


def test_value_heads_are_as_wide_as_keys_unless_said_otherwise() -> None:
    assert HeadShape(q=6, kv=3, dim=8).value_dim == 8
    assert HeadShape(q=6, kv=3, dim=8, v_dim=5).value_dim == 5
    assert HeadShape(q=6, kv=3, dim=8).group == 2


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "3", None, float("nan")])
def test_a_count_that_is_no_positive_integer_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"pool_size is .* must be an integer >= 1"):
        check_count("pool_size", wrong)


def test_a_count_may_be_a_numpy_integer() -> None:
    assert type(check_count("pool_size", np.int32(4))) is int


def test_a_choice_that_there_is_not_is_refused_by_name() -> None:
    check_choice("order", "index", ("grouped", "index"))
    with pytest.raises(ValueError, match="order is 'best'; choose one of 'grouped', 'index'"):
        check_choice("order", "best", ("grouped", "index"))


@pytest.mark.parametrize("wrong", [-1, True, "3", None, float("nan")])
def test_a_limit_may_be_infinite_but_not_negative(wrong: Any) -> None:
    assert PoolConfig(traffic_limit=float("inf"), memory_limit=0).memory_limit == 0.0
    with pytest.raises(ValueError, match=r"traffic_limit is .*a number >= 0, inf for no limit"):
        PoolConfig(traffic_limit=wrong)
