"""Dataclasses from the keys of a file: presets, and errors that name the key and the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from libra.config import check_fields
from libra.cost.fields import (
    check_keys,
    find_preset,
    from_keys,
    preset_sections,
    read_described,
)


@dataclass(frozen=True, kw_only=True)
class Thing:
    name: str
    count: int
    rate: float
    share: float = 0.5
    kind: Literal["one", "two"] = "one"
    exact: bool = False

    def __post_init__(self) -> None:
        check_fields(self, zero=("rate",), shares=("share",))


WHOLE = {"name": "a thing", "count": 1, "rate": 0}
PRESETS = {"usual": Thing(**WHOLE)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"name": ""}, "Thing.name is ''; it must be text"),
        ({"name": 3}, "Thing.name is 3; it must be text"),
        ({"exact": 1}, "Thing.exact is 1; it must be true or false"),
        ({"count": 0}, "Thing.count is 0; it must be an integer >= 1"),
        ({"count": True}, "Thing.count is True"),
        ({"rate": -1}, "Thing.rate is -1; it must be a finite number >= 0"),
        ({"share": 0}, "Thing.share is 0; it must be a finite number > 0 and at most 1"),
        ({"share": 1.5}, "at most 1"),
        ({"kind": "three"}, "Thing.kind is 'three'; choose one of 'one', 'two'"),
    ],
)
def test_a_field_is_checked_by_its_type(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_keys(Thing, WHOLE | changes, "[thing]")


def test_keys_make_a_thing_or_change_a_preset() -> None:
    assert from_keys(Thing, WHOLE, "[thing]") == PRESETS["usual"]
    changed = from_keys(Thing, {"preset": "USUAL", "count": 7}, "[thing]", presets=PRESETS)
    assert (changed.count, changed.name) == (7, "a thing")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"preset": "usual"}, "unknown key 'preset' in"),
        ({"nane": "a", "x": 1}, r"unknown keys 'nane' \(did you mean 'name'\?\), 'x' in \[thing\]"),
        ({"name": "a"}, r"\[thing\] lacks count, rate; give every one$"),
    ],
)
def test_keys_that_are_unknown_or_missing_are_named(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        from_keys(Thing, values, "[thing]")


def test_a_preset_is_found_by_its_name_or_all_are_listed() -> None:
    assert find_preset("thing", "Usual", PRESETS) is PRESETS["usual"]
    with pytest.raises(ValueError, match="thing has no preset 'other'; there are usual"):
        find_preset("thing", "other", PRESETS)
    with pytest.raises(ValueError, match="lacks name, count, rate; give every one, or name a"):
        from_keys(Thing, {}, "[thing]", presets=PRESETS)


def test_the_presets_of_the_package_have_three_sections() -> None:
    for section, name in (("cluster", "h100"), ("model", "qwen3-8b"), ("attention", "flash-3")):
        assert name in preset_sections(section)


def test_a_file_is_read_by_its_ending_and_named_in_every_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    (tmp_path / "x.toml").write_text("a = 1")
    for name in ("x.json", "x.toml"):
        assert read_described(tmp_path / name, lambda values: values["a"]) == 1
        with pytest.raises(ValueError, match=rf"{name}: unknown key 'a' in it; known are b"):
            read_described(tmp_path / name, lambda values: check_keys(values, ["b"], "it"))
    with pytest.raises(ValueError, match=r"cannot read table .*none\.toml"):
        read_described(tmp_path / "none.toml", dict, "table ")
