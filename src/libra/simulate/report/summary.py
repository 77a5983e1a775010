"""What stands above the figures: the recommendation, key numbers, settings, warnings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from libra.simulate.report.charts.tradeoff import candidate_name
from libra.simulate.report.reading import Record, items, number, record, records, words
from libra.simulate.report.spelling import (
    count,
    digits,
    percent,
    seconds,
    short,
    shown,
    three,
    times,
    tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNumber:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    text: str
    line: str
    """To paste; empty where none was made."""

    trailing: tuple[str, ...]
    """The next best, and by how much they are slower."""


Group = tuple[str, tuple[tuple[str, str], ...]]
"""A heading and names with their values."""


def recommended(simulation: Record) -> tuple[int | None, Record]:
    """Index and figures of the recommended candidate; None and nothing where there is none."""
    candidates = records(simulation.get("candidates"))
    index = number(record(simulation.get("recommendation")).get("candidate"))
    if index is None or not 0 <= index < len(candidates):
        return None, {}
    return int(index), candidates[int(index)]


def recommendation(simulation: Record) -> Recommendation:
    said = record(simulation.get("recommendation"))
    candidates = records(simulation.get("candidates"))
    trailing = []
    for entry in records(said.get("trailing")):
        index, behind = number(entry.get("candidate")), number(entry.get("behind"))
        if index is not None and 0 <= index < len(candidates):
            name = candidate_name(candidates[int(index)])
            trailing.append(f"{name}: {percent(behind)} slower" if behind is not None else name)
    return Recommendation(
        text=words(said.get("text")) or "The simulation names no configuration.",
        line=words(said.get("line")),
        trailing=tuple(trailing),
    )


def key_numbers(simulation: Record) -> tuple[KeyNumber, ...]:
    """Those that are known, of the recommended candidate first."""
    _, best = recommended(simulation)
    corpus = record(simulation.get("corpus"))
    settings = record(simulation.get("settings"))
    libra = next((s for s in records(simulation.get("schemes")) if s.get("key") == "libra"), {})
    low, high = number(best.get("step_low")), number(best.get("step_high"))
    between = "" if low is None or high is None else f"{seconds(low)} to {seconds(high)}"
    if low is not None and high is not None and seconds(low) == seconds(high):
        between = ""  # nothing was left to chance
    before, within = number(best.get("before")), number(best.get("intra_mean"))
    held, cap = number(best.get("memory_gigabytes")), number(settings.get("memory_cap_bytes"))
    candidates = (
        (number(libra.get("speedup")), times, "speedup over Ulysses", "whole step"),
        (number(best.get("step_seconds")), seconds, "predicted step", between),
        (number(best.get("tokens_per_second")), short, "tokens per second", "whole cluster"),
        (
            number(best.get("after")),
            percent,
            "imbalance between pools",
            "" if before is None else f"{percent(before)} before",
        ),
        (
            within,
            percent,
            "imbalance inside a pool",
            f"{shown(number(best.get('intra_worst')), percent)} at worst",
        ),
        (
            number(best.get("exposed_share")),
            percent,
            "transfers not hidden",
            "share of the step",
        ),
        (
            held,
            _gigabytes,
            "memory of a GPU",
            "" if cap is None else f"of {digits(cap / 1e9)} GB allowed",
        ),
        (
            number(corpus.get("windows_replayed")),
            count,
            "windows replayed",
            f"of {shown(number(corpus.get('windows')), count)}",
        ),
    )
    return tuple(
        KeyNumber(label=label, value=spell(value), note=note)
        for value, spell, label, note in candidates
        if value is not None
    )


def settings_groups(simulation: Record) -> tuple[Group, ...]:
    """Everything that was chosen, and the corpus as it was read."""
    settings = record(simulation.get("settings"))
    corpus = record(simulation.get("corpus"))
    rest = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    parts: list[tuple[str, Record]] = [("Corpus", corpus)]
    parts += [(words(key).capitalize(), value) for key, value in settings.items() if record(value)]
    parts.append(("Planning", rest))
    groups = ((title, tuple(_spelled(part))) for title, part in parts)
    return tuple((title, pairs) for title, pairs in groups if pairs)


def warnings(simulation: Record) -> tuple[str, ...]:
    return tuple(said for warning in items(simulation.get("warnings")) if (said := words(warning)))


def _gigabytes(value: float) -> str:
    return f"{three(value)} GB"


def _spelled(part: Record, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of what is a plain value; of mappings inside, theirs."""
    for key, value in part.items():
        name = f"{prefix}{words(key).replace('_', ' ')}"
        if isinstance(value, dict):
            if key != "histogram":
                yield from _spelled(value, f"{name}: ")
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif (found := number(value)) is not None:
            yield _with_unit(name, found)
        elif isinstance(value, str) and value:
            yield name, value


def _with_unit(name: str, value: float) -> tuple[str, str]:
    if name.endswith(" bytes"):
        return name.removesuffix(" bytes"), _gigabytes(value / 1e9)
    if name == "tokens" and value % 1024 == 0 and value < 1 << 30:
        return name, f"{count(value)} ({tokens(value)})"
    if value == int(value) and abs(value) < 1e12:
        return name, count(value)
    return name, digits(value, 4)
