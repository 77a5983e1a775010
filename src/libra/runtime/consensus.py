"""One small all-reduce that lets every rank of a pool refuse together, before any tensor moves.

Each rank brings the problem it found, if any, and a few facts that must be equal everywhere.  All
go on, or all raise the same error; the fast path is one all-reduce of three integers on a CPU
group.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from libra.plan.wire import fingerprint
from libra.runtime.failure import finish

_TEXT_BYTES = 1024
_MOST_NAMES = 8


def reach_consensus(
    group: dist.ProcessGroup,
    where: str,
    problem: str | None,
    facts: Mapping[str, object],
    leaving: threading.Event | None = None,
) -> None:
    """Raise the same ValueError on every rank if one has a `problem`, or if `where` or the `facts`
    differ between ranks.

    `where` names the call that agrees, so that ranks which took different paths are told apart.
    Facts are compared by their text.  BrokenGroupError if a rank is lost, or once `leaving` is set.
    """
    stated = _state(where, facts)
    word = fingerprint(stated.encode())
    extremes = torch.tensor([problem is not None, word, -word], dtype=torch.int64)
    work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group, async_op=True)
    finish(work, group, leaving)
    anyone, high, low = extremes.tolist()
    if not anyone and high == -low:
        return
    problems = _exchange_text(group, problem or "", leaving)
    if anyone:
        raise ValueError(_tell("worker", range(len(problems)), problems, ": "))
    every = _exchange_text(group, stated, leaving)
    raise ValueError(f"the ranks of one pool disagree: {_differences('worker', every)}")


def reach_consensus_at_store(ranks: Sequence[int], facts: Mapping[str, object]) -> None:
    """Raise the same ValueError on every one of the global `ranks` if the `facts` differ.

    For the time before there are groups: ranks that disagree on who is in one can't make it.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    stated = _state("", facts)
    place = f"libra/start/{fingerprint(repr(list(ranks)).encode()):x}"
    place += f"/{store.add(f'{place}/turns/{rank}', 1)}"
    ballot = f"{place}/votes/{fingerprint(stated.encode()):x}"
    store.set(f"{place}/stated/{rank}", stated)
    store.add(ballot, 1)
    if store.add(f"{place}/count", 1) == len(ranks):
        store.set(f"{place}/all", "here")
    store.wait([f"{place}/all"])
    if store.add(ballot, 0) == len(ranks):
        return
    every = [store.get(f"{place}/stated/{other}").decode() for other in ranks]
    raise ValueError(f"the ranks of one mesh disagree: {_differences('rank', every, ranks)}")


def _state(where: str, facts: Mapping[str, object]) -> str:
    return "; ".join([where, *(f"{name} {value}" for name, value in facts.items())])


def _differences(kind: str, stated: Sequence[str], names: Sequence[int] | None = None) -> str:
    every = [text.split("; ") for text in stated]
    unlike = [", ".join(_unlike(parts, every)) for parts in every]
    return _tell(kind, names or range(len(every)), unlike, " has ")


def _tell(kind: str, names: Sequence[int], texts: Sequence[str], verb: str) -> str:
    """Who says what; those who say the same together, those who say nothing left out."""
    sayers: dict[str, list[int]] = {}
    for name, text in zip(names, texts, strict=True):
        if text:
            sayers.setdefault(text, []).append(name)
    return "; ".join(f"{_name(kind, who)}{verb}{text}" for text, who in sayers.items())


def _name(kind: str, names: Sequence[int]) -> str:
    shown = ", ".join(map(str, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{kind}{'s' * (len(names) > 1)} {shown}{more}"


def _unlike(parts: list[str], every: list[list[str]]) -> list[str]:
    """The parts of one rank's statement that not all ranks share."""
    shared = set(parts).intersection(*every)
    return [part for part in parts if part not in shared] or parts[:1]


def _exchange_text(
    group: dist.ProcessGroup, text: str, leaving: threading.Event | None
) -> list[str]:
    """Every rank's text, as fixed-size bytes: nothing is unpickled."""
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:_TEXT_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    finish(dist.all_gather(every, mine, group=group, async_op=True), group, leaving)
    return [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in every]
