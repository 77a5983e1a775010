"""Variable-token packing in the manner of WLB-LLM: packs of like cost, not of like length.

The samples of a window are dealt to as many packs again, longest first, each to the pack that costs
least so far and has room for it; a pack may hold more than L tokens, up to a limit that memory
sets.  Nothing is deferred to another step, so a sample that outweighs a pack stays an outlier.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from libra.data.lengths import check_count, check_lengths

IntArray = NDArray[np.int64]


def deal_by_cost(
    lengths: IntArray, packs: int, most_tokens: int, *, linear_tokens: float
) -> list[IntArray]:
    """Indices into `lengths` that each of `packs` packs holds, longest first.

    A sample of l tokens costs l^2 + `linear_tokens` * l: a token's linear layers cost as much as
    that many keys.  Deterministic; O(samples log packs).

    Raises ValueError where a sample has more than `most_tokens` tokens, or where the samples do not
    fit, which first-fit by cost finds when packs are nearly full: raise `most_tokens`.
    """
    check_count("packs", packs)
    check_count("most_tokens", most_tokens)
    checked = check_lengths(lengths)
    order = np.argsort(-checked, kind="stable")
    ranked = checked[order].tolist()
    if ranked and ranked[0] > most_tokens:
        raise ValueError(f"a sample has {ranked[0]} tokens, more than most_tokens={most_tokens}")
    open_packs = [(0.0, pack) for pack in range(packs)]
    tokens = [0] * packs
    held: list[list[int]] = [[] for _ in range(packs)]
    for sample, length in zip(order.tolist(), ranked, strict=True):
        passed = []
        while open_packs:
            cost, pack = heapq.heappop(open_packs)
            if tokens[pack] + length <= most_tokens:
                held[pack].append(sample)
                tokens[pack] += length
                heapq.heappush(open_packs, (cost + length * (length + linear_tokens), pack))
                break
            if tokens[pack] < most_tokens:
                passed.append((cost, pack))
        else:
            raise ValueError(
                f"{packs} packs of at most {most_tokens} tokens cannot take a sample of {length} "
                "more; raise most_tokens"
            )
        for entry in passed:
            heapq.heappush(open_packs, entry)
    return [np.array(pack, dtype=np.int64) for pack in held]


def pack_by_cost(
    lengths: IntArray, packs: int, most_tokens: int, *, linear_tokens: float
) -> list[IntArray]:
    """The lengths of each pack that `deal_by_cost` makes."""
    dealt = deal_by_cost(lengths, packs, most_tokens, linear_tokens=linear_tokens)
    return [np.asarray(lengths, dtype=np.int64)[pack] for pack in dealt]
