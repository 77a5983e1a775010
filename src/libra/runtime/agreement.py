"""One small all-reduce that lets every rank of a pool refuse together, before any tensor moves.

Each rank brings the problem it found, if any, and a few facts that must be equal everywhere.  All
go on, or all raise the same error; the fast path is one all-reduce of three integers on a CPU
group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

_TEXT_BYTES = 1024


def agree(
    group: dist.ProcessGroup, where: str, problem: str | None, facts: Mapping[str, object]
) -> None:
    """Raise the same ValueError on every rank if one has a `problem`, or if `where` or the `facts`
    differ between ranks.

    `where` names the call that agrees, so that ranks which took different paths are told apart.
    Facts are compared by their text.
    """
    stated = "; ".join([where, *(f"{name} {value}" for name, value in facts.items())])
    word = int.from_bytes(hashlib.blake2b(stated.encode(), digest_size=8).digest(), "little") >> 1
    extremes = torch.tensor([problem is not None, word, -word], dtype=torch.int64)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    anyone, high, low = extremes.tolist()
    if not anyone and high == -low:
        return
    problems = _exchange_text(group, problem or "")
    if anyone:
        told = [f"worker {worker}: {text}" for worker, text in enumerate(problems) if text]
        raise ValueError("; ".join(told))
    every = [text.split("; ") for text in _exchange_text(group, stated)]
    told = [
        f"worker {worker} has {', '.join(_unlike(parts, every))}"
        for worker, parts in enumerate(every)
    ]
    raise ValueError("the ranks of one pool disagree: " + "; ".join(told))


def _unlike(parts: list[str], every: list[list[str]]) -> list[str]:
    """The parts of one rank's statement that not all ranks share."""
    shared = set(parts).intersection(*every)
    return [part for part in parts if part not in shared] or parts[:1]


def _exchange_text(group: dist.ProcessGroup, text: str) -> list[str]:
    """Every rank's text, as fixed-size bytes: nothing is unpickled."""
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:_TEXT_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in every]
