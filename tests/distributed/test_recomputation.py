"""What autograd may do with an attention call: run it again, run its backward twice, keep its
tensors elsewhere, compile it.  And what it may not, refused on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import libra
from examples.decoder import Decoder
from tests.distributed.cases import make_pool
from tests.distributed.model_cases import (
    MODEL,
    TOKENS,
    LibraAttend,
    Pack,
    make_model,
    make_pack,
    summed_loss,
)
from tests.distributed.ranks import RankPool
from tests.distributed.training_cases import recompute_blocks

ROWS = torch.arange(TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A pool of one pack a rank, a model, and two of its microbatches."""

    pool: libra.SequencePool
    model: Decoder
    packs: tuple[Pack, Pack]
    microbatches: tuple[libra.Microbatch, libra.Microbatch]

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The embedding's gradient of `loss` alone."""
        self.model.zero_grad()
        loss.backward()
        return self.model.embed.weight.grad.clone()

    def loss(self, microbatch: int) -> torch.Tensor:
        return summed_loss(self.model, self.packs[microbatch], ROWS)


@contextmanager
def setting(
    rank: int, world_size: int, recompute: str = "nothing", pool_size: int = 2, **changes: object
) -> Iterator[Setting]:
    config = libra.PoolConfig(pool_size=pool_size, block_size=8, chunks=2).replace(**changes)
    pool = make_pool(world_size, 1, config)
    attend = LibraAttend()
    model = make_model(attend, torch.float64)
    recompute_blocks(model, attend, recompute)
    first, second = (make_pack(0, microbatch, rank) for microbatch in range(2))
    microbatches = [pool.microbatch(pack.bounds, tokens=TOKENS) for pack in (first, second)]
    try:
        yield Setting(pool, model, (first, second), (microbatches[0], microbatches[1]))
    finally:
        pool.close()


def inner_microbatch_after_an_outer_one(rank: int, world_size: int) -> tuple[float, float]:
    """Losses of the inner microbatch, without and with a call of the outer one in between."""
    with setting(rank, world_size) as s, torch.no_grad():
        outer, inner = s.microbatches
        with inner:
            alone = s.loss(1).item()
        with outer, inner:
            with outer:
                s.loss(0)
            return alone, s.loss(1).item()


def recomputed_in_own_microbatch(rank: int, world_size: int) -> bool:
    """Two forwards, then their backwards, whose recomputations enter their microbatches by
    themselves.
    """
    with setting(rank, world_size) as s:
        expected = []
        for index, microbatch in enumerate(s.microbatches):
            with microbatch:
                expected.append(s.gradient(s.loss(index)))
        losses = []
        forwards = [block.forward for block in s.model.blocks]
        for index, microbatch in enumerate(s.microbatches):
            contexts = partial(lambda microbatch: (nullcontext(), microbatch), microbatch)
            for block, forward in zip(s.model.blocks, forwards, strict=True):
                block.forward = partial(
                    checkpoint, forward, use_reentrant=False, context_fn=contexts
                )
            with microbatch:
                losses.append(s.loss(index))
        got = [s.gradient(loss) for loss in losses]
        return all(map(torch.equal, got, expected))


def recomputed_elsewhere(rank: int, world_size: int, pool_size: int, inside: bool) -> None:
    """The first microbatch's backward, inside the second's microbatch or inside none."""
    with setting(rank, world_size, "blocks", pool_size) as s:
        with s.microbatches[0]:
            loss = s.loss(0)
        with s.microbatches[1] if inside else nullcontext():
            loss.backward()


def backward_twice(rank: int, world_size: int, backward: str) -> bool:
    with setting(rank, world_size, backward=backward) as s, s.microbatches[0]:
        loss = s.loss(0)
        loss.backward(retain_graph=True)
        first = s.model.embed.weight.grad.clone()
        return torch.equal(s.gradient(loss), first)


def backward_of_a_freed_graph(rank: int, world_size: int) -> None:
    with setting(rank, world_size) as s, s.microbatches[0]:
        loss = s.loss(0)
        loss.backward()
        loss.backward()


def backward_of_a_backward(rank: int, world_size: int) -> None:
    with setting(rank, world_size) as s, s.microbatches[0]:
        gradients = torch.autograd.grad(s.loss(0), list(s.model.parameters()), create_graph=True)
        torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum().backward()


def saved_elsewhere(rank: int, world_size: int) -> bool:
    with setting(rank, world_size) as s, s.microbatches[0]:
        expected = s.gradient(s.loss(0))
        with torch.autograd.graph.save_on_cpu():
            return torch.equal(s.gradient(s.loss(0)), expected)


def compiled(rank: int, world_size: int) -> bool:
    with setting(rank, world_size) as s:
        fast = torch.compile(s.model, backend="aot_eager", fullgraph=True)
        for pack, microbatch in zip(s.packs, s.microbatches, strict=True):
            with microbatch:
                expected = s.gradient(summed_loss(s.model, pack, ROWS))
                got = s.gradient(summed_loss(fast, pack, ROWS))
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        return True


def closed_with_plans_pending(rank: int, world_size: int) -> None:
    with setting(rank, world_size) as s:
        s.pool._runtime.plan_for(libra.HeadShape(MODEL.heads, MODEL.kv_heads, MODEL.head_dim, 8))
        for microbatch in range(8):
            packs = [make_pack(0, microbatch, replica) for replica in range(world_size)]
            s.pool.prefetch([pack.bounds for pack in packs], tokens=TOKENS)
        time.sleep(0.02 * rank)


def test_an_outer_microbatch_may_be_entered_again_inside_an_inner_one(ranks2: RankPool) -> None:
    for alone, between in ranks2.run(inner_microbatch_after_an_outer_one):
        assert alone == between


def test_a_microbatch_is_a_context_for_its_recomputation(ranks2: RankPool) -> None:
    assert all(ranks2.run(recomputed_in_own_microbatch))


@pytest.mark.parametrize("pool_size", [1, 2])
def test_a_recomputation_inside_another_microbatch_is_refused_everywhere(
    ranks2: RankPool, pool_size: int
) -> None:
    for error in ranks2.run(recomputed_elsewhere, pool_size, True, expect_error=True):
        assert error.startswith("CheckpointError") and "different metadata" in error


def test_a_recomputation_outside_its_microbatch_says_what_to_do(ranks2: RankPool) -> None:
    for error in ranks2.run(recomputed_elsewhere, 2, False, expect_error=True):
        assert "outside a microbatch" in error and "microbatch=..." in error


@pytest.mark.parametrize("backward", ["retain", "refetch"])
def test_a_retained_graph_gives_the_same_gradients_again(ranks2: RankPool, backward: str) -> None:
    assert all(ranks2.run(backward_twice, backward))


def test_a_freed_graph_moves_nothing(ranks2: RankPool) -> None:
    for error in ranks2.run(backward_of_a_freed_graph, expect_error=True):
        assert "a second time" in error


def test_second_derivatives_are_refused(ranks2: RankPool) -> None:
    for error in ranks2.run(backward_of_a_backward, expect_error=True):
        assert "libra.attention_backward" in error


def test_saved_tensors_may_be_kept_elsewhere(ranks2: RankPool) -> None:
    assert all(ranks2.run(saved_elsewhere))


def test_the_model_compiles_as_one_graph(ranks2: RankPool) -> None:
    assert all(ranks2.run(compiled, timeout=120))


def test_a_pool_closes_on_all_ranks_whatever_its_planners_still_had_to_do(
    ranks2: RankPool,
) -> None:
    for _ in range(4):
        ranks2.run(closed_with_plans_pending, timeout=20)
