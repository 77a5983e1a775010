"""Problems of q, k and v that are found before any tensor moves."""

from __future__ import annotations

import pytest
import torch

import libra
from libra.runtime.inputs import describe, find_problem, head_shape

CONFIG = libra.PoolConfig(pool_size=2, chunks=2)
Q, KV = torch.empty(8, 4, 16), torch.empty(8, 2, 16)


def problem(q: torch.Tensor = Q, k: torch.Tensor = KV, v: torch.Tensor = KV) -> str | None:
    return find_problem(q, k, v, 8, 16, CONFIG, 2)


def test_fitting_tensors_have_no_problem() -> None:
    assert problem() is None
    assert problem(v=torch.empty(8, 2, 24)) is None


@pytest.mark.parametrize(
    "tensors, part",
    [
        ({"q": Q[0]}, r"must be \[tokens on this rank, heads, head dim\]"),
        ({"k": KV.half()}, "share one dtype"),
        ({"q": Q.int(), "k": KV.int(), "v": KV.int()}, "dtype torch.int32 is not supported"),
        ({"k": KV.to("meta")}, "must be on one device"),
        ({"q": Q[:7]}, "holds 8 of the microbatch's 16 tokens"),
        ({"k": torch.empty(8, 3, 16), "v": torch.empty(8, 3, 16)}, "divide the query heads"),
        ({"q": torch.empty(8, 4, 8)}, "the same head dim"),
        (
            {"q": torch.empty(8, 3, 16), "k": torch.empty(8, 1, 16), "v": torch.empty(8, 1, 16)},
            "chunks",
        ),
    ],
)
def test_a_problem_says_what_is_needed(tensors: dict[str, torch.Tensor], part: str) -> None:
    text = problem(**tensors)
    assert text is not None
    with pytest.raises(ValueError, match=part):
        raise ValueError(text)


def test_the_head_shape_has_a_value_dim_where_it_differs() -> None:
    assert head_shape(Q, KV, KV) == libra.HeadShape(4, 2, 16, 4)
    assert head_shape(Q, KV, torch.empty(8, 2, 24)) == libra.HeadShape(4, 2, 16, 4, 24)


def test_facts_that_all_ranks_share() -> None:
    assert describe(Q, KV, KV) == {
        "dtype": "float32",
        "device": "cpu",
        "heads": "4 query / 2 key-value",
        "head dim": "16 / 16",
    }
