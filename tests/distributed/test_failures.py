"""Bad input: one clear ValueError, the same on every rank, before any tensor moves; the pool stays
usable.  A rank that waits for the others instead fails its test within seconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.distributed import refusals
from tests.distributed.ranks import RankPool
from tests.distributed.refusals import BOUNDS, Refusal, Tensors


def check(outcomes: Sequence[Refusal], pattern: str) -> None:
    """All ranks were told the same, by `pattern`, and the call after it was right."""
    texts = {outcome.text for outcome in outcomes}
    assert len(texts) == 1, texts
    (text,) = texts
    assert re.fullmatch("ValueError: " + pattern, text, re.DOTALL), text
    assert max(outcome.then for outcome in outcomes) < 1e-12


def stack(inputs: Tensors) -> Tensors:
    return inputs[0][None], inputs[1], inputs[2]


def reduce_to_number(inputs: Tensors) -> Tensors:
    return inputs[0].sum(), inputs[1], inputs[2]


def drop_a_query(inputs: Tensors) -> Tensors:
    return inputs[0][:-1], inputs[1], inputs[2]


def lower_v(inputs: Tensors) -> Tensors:
    return inputs[0].float(), inputs[1].float(), inputs[2].bfloat16()


def lose_k(inputs: Tensors) -> Tensors:
    return inputs[0], inputs[1].to("meta"), inputs[2]


def widen_k(inputs: Tensors) -> Tensors:
    return inputs[0], torch.cat([inputs[1]] * 2, dim=2), inputs[2]


def drop_value_head(inputs: Tensors) -> Tensors:
    return inputs[0], inputs[1], inputs[2][:, :1]


WRONG_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "one row short": ({"rows": 15}, {}, None, r"this rank holds 16 .* must sum to the tokens .*"),
    "queries one row short": ({}, {}, drop_a_query, r"this rank holds 16 .* q \[15, 4, 8\].*"),
    "four dimensions": ({}, {}, stack, r"q, k and v must be \[tokens .* q \[1, 16, 4, 8\].*"),
    "no dimension": ({}, {}, reduce_to_number, r"q, k and v must be .* q \[\],.*"),
    "3 heads in 2 chunks": ({"q": 3, "kv": 3}, {}, None, r".*3 query heads .* into 2 chunks.*"),
    "4 heads over 3": ({"kv": 3}, {}, None, r"key and value heads must .* divide .*"),
    "no key heads": ({"kv": 0}, {}, None, r"key and value heads must .* divide .*"),
    "fewer value heads": ({}, {}, drop_value_head, r"key and value heads must be equal .*"),
    "bf16 v": ({}, {}, lower_v, r".*share one dtype; got .* v torch.bfloat16: cast them.*"),
    "integers": ({"dtype": torch.int64}, {}, None, r"dtype torch.int64 is not supported; use .*"),
    "all on meta": ({"device": "meta"}, {}, None, r".*on one device and hold data; got q on .*"),
    "k on meta": ({}, {}, lose_k, r".*one device .* got q on cpu, k on meta, v on cpu"),
    "wider keys": ({}, {}, widen_k, r"q and k must have the same head dim.* k \[16, 2, 16\].*"),
    "no head dim": ({"dim": 0}, {}, None, r"q and k must have .* none may be 0.*"),
    "no value dim": ({"value_dim": 0}, {}, None, r"q and k must have .* none may be 0.*"),
    "not causal": ({}, {"causal": False}, None, r"causal=False: .* use another kernel .*"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
@pytest.mark.parametrize("guilty", ["every rank", "last rank"])
def test_a_wrong_attention_call_is_refused_everywhere(
    ranks2: RankPool, name: str, guilty: str
) -> None:
    here, options, reshape, pattern = WRONG_CALLS[name]
    wrong, right = (here, options, reshape), ({}, {}, None)
    args = [wrong if guilty == "every rank" else right, wrong]
    who = "workers 0, 1: " if guilty == "every rank" else "worker 1: "
    check(ranks2.run_each(refusals.refused_call, args, timeout=20), who + pattern)


@pytest.mark.parametrize(
    "here, options, parts",
    [
        ({"dtype": torch.float32}, {}, ("dtype float64", "dtype float32")),
        ({"q": 8}, {}, ("heads 4 query / 2 key-value", "heads 8 query / 2 key-value")),
        ({"value_dim": 4}, {}, ("head dim 8 / 8", "head dim 8 / 4")),
        ({}, {"scale": 0.5}, (r"scale 0\.35\d*", r"scale 0\.5")),
    ],
)
def test_ranks_whose_tensors_differ_are_told_in_what(
    ranks2: RankPool, here: dict[str, Any], options: dict[str, Any], parts: tuple[str, str]
) -> None:
    args = [({}, {}, None), (here, options, None)]
    check(
        ranks2.run_each(refusals.refused_call, args, timeout=20),
        f"the ranks of one pool disagree: worker 0 has {parts[0]}; worker 1 has {parts[1]}",
    )


@pytest.mark.parametrize(
    "mode, parts",
    [
        ("frozen inputs", ("grad True", "grad False")),
        ("no_grad", ("grad True", "grad False")),
        ("autocast", ("dtype float32", "dtype bfloat16")),
    ],
)
def test_ranks_that_call_in_different_modes_are_refused(
    ranks2: RankPool, mode: str, parts: tuple[str, str]
) -> None:
    check(
        ranks2.run(refusals.refused_mode, mode, timeout=20),
        f"the ranks of one pool disagree: worker 0 has {parts[0]}; worker 1 has {parts[1]}",
    )


def test_ranks_inside_different_microbatches_are_refused(ranks2: RankPool) -> None:
    check(
        ranks2.run(refusals.refused_inside_other_microbatch, timeout=20),
        r"the ranks of one pool disagree: worker 0 has microbatch \w+; worker 1 has microbatch \w+",
    )


def test_a_call_outside_a_microbatch_says_how_to_make_one(ranks2: RankPool) -> None:
    for outcome in ranks2.run(refusals.refused_outside, timeout=20):
        assert "outside a microbatch: wrap the forward in `with pool.microbatch(" in outcome.text
        assert outcome.then < 1e-12


@pytest.mark.parametrize(
    "bounds, tokens, pattern",
    [
        ([0, 9, 7, 16], None, r"cu_seqlens falls from 9 to 7 .* would have -2 tokens.*"),
        ([4, 16], None, r"cu_seqlens starts at 4; it must start at 0"),
        ([], None, r"cu_seqlens is empty.*"),
        ([0, 8.5, 16], None, r"cu_seqlens\[1\] is 8.5.*must be an integer"),
        ([[0, 16]], None, r"cu_seqlens.*"),
        ([0, 16], 12, r"cu_seqlens ends at 16 but the pack has 12 tokens"),
    ],
)
@pytest.mark.parametrize("guilty", ["every rank", "last rank"])
def test_wrong_sample_bounds_are_refused_everywhere(
    ranks2: RankPool, bounds: Any, tokens: int | None, pattern: str, guilty: str
) -> None:
    wrong, right = (bounds, tokens), ([0, 5, 12], tokens or 16)
    args = [wrong if guilty == "every rank" else right, wrong]
    who = "workers 0, 1: " if guilty == "every rank" else "worker 1: "
    check(ranks2.run_each(refusals.refused_microbatch, args, timeout=20), who + pattern)


def test_packs_of_different_length_are_refused(ranks2: RankPool) -> None:
    check(
        ranks2.run_each(refusals.refused_microbatch, [([0, 16], None), ([0, 9], None)], timeout=20),
        "the ranks of one pool disagree: worker 0 has tokens 16; worker 1 has tokens 9",
    )


def test_an_empty_pack_without_its_length_is_refused(ranks2: RankPool) -> None:
    check(ranks2.run(refusals.refused_microbatch, [0], None, timeout=20), r"a pack of 0 tokens .*")


def test_ranks_of_one_context_parallel_group_must_share_their_lengths(ranks4: RankPool) -> None:
    args = [([0, 16], None, 2)] * 3 + [([0, 8, 16], None, 2)]
    check(
        ranks4.run_each(refusals.refused_microbatch, args, timeout=20),
        r"workers 2 and 3 share one pack \(CP 2\) but gave different cu_seqlens; .*",
    )


@pytest.mark.parametrize(
    "there, pattern",
    [
        ({"block_size": 8}, r".*rank 0 has configuration .*block_size=4.*; rank 1 has .*=8.*"),
        ({"pool_size": 1}, r".*rank 0 has configuration .*pool_size=2.*; rank 1 has .*=1.*"),
        ({"backward": "refetch"}, r".*rank 0 has configuration .*'retain'.*; rank 1 .*refetch.*"),
    ],
)
def test_ranks_configured_differently_can_not_make_a_pool(
    ranks2: RankPool, there: dict[str, Any], pattern: str
) -> None:
    args = [({}, ("dp",), {}), (there, ("dp",), {})]
    outcomes = ranks2.run_each(refusals.refused_pool, args, timeout=20)
    check(outcomes, "the ranks of one mesh disagree: " + pattern)


@pytest.mark.parametrize(
    "config, names, options, pattern",
    [
        ({"pool_size": 3}, ("dp",), {}, r"pool_size 3 does not divide .* size 2 .*choose.*"),
        ({"pool_size": 2}, ("dp", "cp"), {}, r"pool_size 2 does not divide .* size 1 .*choose.*"),
        ({}, ("replica",), {}, r"the mesh has dimensions \('replica',\), not \['dp'\]; name .*"),
        ({}, ("dp",), {"dp": ("dp", "fsdp")}, r"the mesh has .* not \['fsdp'\]; name .*"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    ranks2: RankPool, config: Any, names: tuple[str, ...], options: Any, pattern: str
) -> None:
    check(ranks2.run(refusals.refused_pool, config, names, options, timeout=20), pattern)


def test_a_kernel_that_one_rank_lacks_is_refused_by_all(ranks2: RankPool) -> None:
    check(
        ranks2.run(refusals.refused_kernel, timeout=20),
        r"worker 1: kernel='flash3' does not serve device cpu; choose one of cpu",
    )


@pytest.mark.parametrize(
    "fault, pattern",
    [
        ("no plan", "worker 0: no room for a plan"),
        ("another microbatch", r"workers 0, 1: the plan is for another microbatch: .*"),
        ("foreign", r"worker 1: the buffer is not a Libra plan: .*"),
        ("truncated", r"worker 1: the plan buffer is truncated or damaged.*"),
    ],
)
def test_a_plan_that_fails_anywhere_fails_everywhere(
    ranks2: RankPool, fault: str, pattern: str
) -> None:
    check(ranks2.run(refusals.refused_plan, fault, timeout=20), pattern)


def test_a_closed_pool_says_so(ranks2: RankPool) -> None:
    check(ranks2.run(refusals.refused_when_closed, timeout=20), r"the pool is closed; make .*")


@pytest.mark.parametrize(
    "packs, pattern",
    [
        ([BOUNDS], r"ValueError: prefetch got 1 packs for a pool of pool_size=2"),
        ([[0, 9, 7], [0, 7]], r"ValueError: cu_seqlens falls from 9 to 7 .*"),
    ],
)
def test_a_prefetch_that_one_rank_refuses_leaves_the_pool_usable(
    ranks2: RankPool, packs: list[Any], pattern: str
) -> None:
    first, last = ranks2.run(refusals.refused_prefetch, packs, timeout=20)
    assert first.text == "nothing was raised"
    assert re.fullmatch(pattern, last.text)
    assert max(first.then, last.then) < 1e-12


def test_an_output_that_one_loss_leaves_out_is_refused_not_waited_for(ranks2: RankPool) -> None:
    check(
        ranks2.run(refusals.left_out_output, timeout=20),
        "the ranks of one pool disagree: worker 0 has call 2; worker 1 has call 1",
    )


def test_a_backward_that_one_rank_leaves_out_is_refused_at_its_next_microbatch(
    ranks2: RankPool,
) -> None:
    check(
        ranks2.run(refusals.left_out_backward, timeout=20),
        r"the ranks of one pool disagree: worker 0 has attention's backward, .*; "
        r"worker 1 has microbatch, .*",
    )
