"""Consensus: every rank of a pool goes on, or all raise the same error before any tensor moves.

Each rank states the problem that it found, if any, and a few facts that must be equal on all ranks.
While all is well this costs one all-reduce of three integers on a CPU group; only after a
difference do the ranks exchange texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from libra.plan.pool_plan import fingerprint
from libra.runtime.failure import finish
from libra.runtime.torch_private import default_store

_TEXT_BYTES = 1024
_MOST_NAMES = 8


def reach_consensus(
    group: dist.ProcessGroup, where: str, problem: str | None, facts: Mapping[str, object]
) -> None:
    """Raise the same ValueError on every rank if one has a `problem`, or if `where` or the `facts`
    differ between ranks.

    `where` names the calling step, so that ranks which took different paths are found out.  Facts
    are compared by their text.  Raises BrokenGroupError if a rank is lost.
    """
    # Step 1: compare fingerprints.  The largest of word and the largest of -word tell whether all
    # words are equal: words 7, 7 have extremes 7 and -7, words 7, 5 have 7 and -5.
    stated = _state(where, facts)
    word = fingerprint(stated.encode())
    extremes = torch.tensor([problem is not None, word, -word], dtype=torch.int64)
    work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group, async_op=True)
    finish(work, group)
    anyone, high, low = extremes.tolist()
    if not anyone and high == -low:
        return
    # Step 2: only after a difference, exchange the texts; every rank raises the same ones.
    problems = _gather_text(group, problem or "")
    if anyone:
        raise ValueError(_attribute("worker", range(len(problems)), problems, ": "))
    every = _gather_text(group, stated)
    raise ValueError(f"the ranks of one pool disagree: {_differences('worker', every)}")


def reach_consensus_at_store(ranks: Sequence[int], facts: Mapping[str, object]) -> None:
    """Raise the same ValueError on every one of the global `ranks` if the `facts` differ.

    For the time before there are process groups: ranks that disagree on the members of a group
    cannot make it.
    """
    # Step 1: state the facts, and vote for them; every turn at the same ranks has keys of its own.
    store, rank = default_store(), dist.get_rank()
    stated = _state("", facts)
    key = f"libra/start/{fingerprint(repr(list(ranks)).encode()):x}"
    key += f"/{store.add(f'{key}/turns/{rank}', 1)}"
    votes = f"{key}/votes/{fingerprint(stated.encode()):x}"
    store.set(f"{key}/stated/{rank}", stated)
    store.add(votes, 1)
    # Step 2: wait until the last rank has voted.
    if store.add(f"{key}/count", 1) == len(ranks):
        store.set(f"{key}/all", "here")
    store.wait([f"{key}/all"])
    if store.add(votes, 0) == len(ranks):
        return
    # Step 3: one of the votes is for other facts: tell them apart.
    every = [store.get(f"{key}/stated/{other}").decode() for other in ranks]
    raise ValueError(f"the ranks of one mesh disagree: {_differences('rank', every, ranks)}")


def gather(group: dist.ProcessGroup, mine: Tensor) -> Tensor:
    """Every rank's CPU tensor `mine`, in rank order, [ranks, *mine.shape]."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    finish(dist.all_gather(every, mine, group=group, async_op=True), group)
    return torch.stack(every)


def _gather_text(group: dist.ProcessGroup, text: str) -> list[str]:
    """Every rank's text, as bytes of one size: nothing is unpickled."""
    padded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    every = gather(group, torch.tensor(list(padded), dtype=torch.uint8))
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in every.tolist()]


def _state(where: str, facts: Mapping[str, object]) -> str:
    return "; ".join([where, *[f"{name} {value}" for name, value in facts.items()]])


def _differences(kind: str, stated: Sequence[str], names: Sequence[int] | None = None) -> str:
    """The parts of each rank's statement that not all ranks share."""
    # "a 1; b 2" and "a 1; b 3" share "a 1": they differ in "b 2" and "b 3".
    every = [text.split("; ") for text in stated]
    shared = set(every[0]).intersection(*every)
    unlike = [[part for part in parts if part not in shared] or parts[:1] for parts in every]
    return _attribute(kind, names or range(len(every)), list(map(", ".join, unlike)), " has ")


def _attribute(kind: str, names: Sequence[int], texts: Sequence[str], verb: str) -> str:
    """Every text after the ranks that state it; ranks without a text are left out."""
    ranks: dict[str, list[int]] = {}
    for name, text in zip(names, texts, strict=True):
        if text:
            ranks.setdefault(text, []).append(name)
    return "; ".join(f"{_name(kind, who)}{verb}{text}" for text, who in ranks.items())


def _name(kind: str, names: Sequence[int]) -> str:
    shown = ", ".join(map(str, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{kind}{'s' * (len(names) > 1)} {shown}{more}"
