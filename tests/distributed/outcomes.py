"""What the ranks of one case came to, and how a failed case is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Returned:
    """The case returned on this rank."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The case raised on this rank."""

    error: str
    """`TypeName: message`, one error without its traceback."""
    traceback: str


@dataclass(frozen=True, slots=True)
class Lost:
    """This rank did not answer, or its process ended."""

    why: str
    stacks: str


Outcome = Returned | Raised | Lost


class RankError(AssertionError):
    """A case did not end as expected.  `outcomes[rank]` tells how each rank ended."""

    def __init__(self, headline: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        super().__init__("\n\n".join([headline, *_reports(self.outcomes)]))


def settle(outcomes: Sequence[Outcome], *, expect_error: bool, case: str) -> list[Any]:
    """The ranks' values, or with `expect_error` the ranks' errors as `TypeName: message`.

    Raises RankError if one rank raised (unexpected), returned (error expected) or was lost.
    """
    lost = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Lost)]
    raised = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Raised)]
    if lost:
        head = f"{case}: ranks {lost} of {len(outcomes)} gave no answer"
        raise RankError(head + (f", ranks {raised} raised" if raised else ""), outcomes)
    if expect_error:
        if len(raised) < len(outcomes):
            returned = [rank for rank in range(len(outcomes)) if rank not in raised]
            raise RankError(f"{case}: ranks {returned} returned, an error was due", outcomes)
        return [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]
    if raised:
        raise RankError(f"{case}: ranks {raised} of {len(outcomes)} raised", outcomes)
    return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]


def _reports(outcomes: Sequence[Outcome]) -> list[str]:
    """One text per rank that failed; ranks with the same traceback share one."""
    texts: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        match outcome:
            case Raised(traceback=traceback):
                texts.setdefault(traceback.rstrip(), []).append(rank)
            case Lost(why=why, stacks=stacks):
                texts.setdefault(f"{why}\n{stacks}".rstrip(), []).append(rank)
    return [
        f"--- rank {', '.join(map(str, ranks))} {'-' * 60}\n{text}" for text, ranks in texts.items()
    ]
