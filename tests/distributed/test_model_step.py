"""A training step with Libra equals the same step with Ulysses and in a single process: the loss
and every parameter gradient, whatever else the training loop does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from libra.config import PoolConfig
from tests.distributed.model_cases import MODEL, Trained, single_process
from tests.distributed.ranks import RankPool
from tests.distributed.training_cases import Training, train

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}
ATTENTION_RUNS = {
    "blocks": 2,
    "blocks, reentrant": 2,
    "all but attention": 1,
    "all but projections": 2,
}
"""Attention forwards of a layer under each kind of activation checkpointing."""


@pytest.fixture
def ranks(request: pytest.FixtureRequest, mesh: tuple[int, int]) -> RankPool:
    """The ranks of `mesh`: data-parallel replicas, context-parallel ranks."""
    return request.getfixturevalue(f"ranks{mesh[0] * mesh[1]}")


def ulysses(**changes: Any) -> PoolConfig:
    return PoolConfig(pool_size=1, placement="ulysses", chunks=2).replace(**changes)


def libra_pool(pool_size: int, **changes: Any) -> PoolConfig:
    config = PoolConfig(pool_size=pool_size, block_size=8, head_shards=2, chunks=2)
    return config.replace(**changes)


def configs(dp: int, **changes: Any) -> list[PoolConfig]:
    """Ulysses, Libra with every pool size that a job of `dp` replicas allows, and the paper's
    placement in one pool of all.
    """
    sizes = [size for size in (1, 2, 4) if dp % size == 0]
    return [
        ulysses(**changes),
        *(libra_pool(size, **changes) for size in sizes),
        libra_pool(dp, placement="paper", **changes),
    ]


def check(ranks: RankPool, case: Training, tolerance: float | None = None) -> list[Trained]:
    """Train on all ranks and hold every loss and gradient against the single process."""
    tolerance = TOLERANCE[case.dtype] if tolerance is None else tolerance
    replicas = ranks.world_size // case.cp
    expected = single_process(replicas, case.microbatches, case.steps, case.dtype, case.autocast)
    gradients = {name: g for name, g in expected.gradients.items() if case.trains in name}
    every = ranks.run(train, case)
    for rank, trained in enumerate(every):
        assert trained.losses == pytest.approx(expected.losses, rel=tolerance, abs=0), rank
        assert trained.gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (trained.gradients[name] - gradient).abs().max() / gradient.abs().max()
            assert error <= tolerance, (rank, name, float(error))
        if case.evaluate:
            assert trained.evaluated == pytest.approx(expected.losses, rel=tolerance, abs=0), rank
    return every


@pytest.mark.parametrize(
    "mesh, shards",
    [
        ((2, 1), "contiguous"),
        ((1, 2), "contiguous"),
        ((1, 2), "zigzag"),
        ((2, 2), "contiguous"),
        ((2, 2), "zigzag"),
        ((4, 1), "contiguous"),
    ],
)
def test_one_step_is_the_same_under_every_placement(
    ranks: RankPool, mesh: tuple[int, int], shards: str
) -> None:
    dp, cp = mesh
    for config in configs(dp, shard_layout=shards):
        every = check(ranks, Training(config=config, cp=cp))
        shared = config.pool_size * cp > 1
        assert all((trained.bytes_moved > 0) == shared for trained in every), config


@pytest.mark.parametrize("wrapping", ["none", "ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_gradients_accumulate_under_every_wrapper(
    ranks: RankPool, mesh: tuple[int, int], wrapping: str
) -> None:
    case = Training(config=libra_pool(2), cp=mesh[1], wrapping=wrapping, microbatches=3)
    check(ranks, case)
    if mesh[1] > 1:
        check(ranks, replace(case, config=libra_pool(1), microbatches=2))
        check(ranks, replace(case, config=ulysses(), microbatches=2))


@pytest.mark.parametrize("recompute", ATTENTION_RUNS)
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_activation_checkpointing_changes_nothing(
    ranks: RankPool, mesh: tuple[int, int], recompute: str
) -> None:
    case = Training(config=libra_pool(2), cp=mesh[1], recompute=recompute, microbatches=2)
    for wrapping, config in (
        ("none", ulysses() if mesh[1] > 1 else libra_pool(2, placement="paper")),
        ("ddp", libra_pool(2, shard_layout="zigzag")),
        ("fsdp", libra_pool(2, backward="refetch")),
    ):
        every = check(ranks, replace(case, wrapping=wrapping, config=config))
        calls = case.microbatches * MODEL.layers * ATTENTION_RUNS[recompute]
        assert [trained.attention_forwards for trained in every] == [calls] * ranks.world_size


@pytest.mark.parametrize("placement", ["surplus", "paper", "ulysses"])
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_fetching_again_for_the_backward_changes_nothing(
    ranks: RankPool, mesh: tuple[int, int], placement: str
) -> None:
    config = libra_pool(1 if placement == "ulysses" else mesh[0], placement=placement)
    for backward in ("retain", "refetch"):
        check(ranks, Training(config=config.replace(backward=backward), cp=mesh[1]))


# DDP is left out: it arms its reduction in the forward, for the one backward that follows.
@pytest.mark.parametrize("recompute", ["nothing", *ATTENTION_RUNS])
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_backwards_may_come_after_all_forwards(
    ranks: RankPool, mesh: tuple[int, int], recompute: str
) -> None:
    case = Training(
        config=libra_pool(mesh[0]),
        cp=mesh[1],
        recompute=recompute,
        order="forwards first",
        microbatches=3,
    )
    check(ranks, case)
    if mesh[1] > 1:
        check(ranks, replace(case, config=ulysses()))
    else:
        refetch = libra_pool(2, backward="refetch")
        check(ranks, replace(case, wrapping="fsdp", config=refetch))


@pytest.mark.parametrize("wrapping", ["none", "fsdp"])
@pytest.mark.parametrize("mesh", [(2, 2)])
def test_backwards_may_come_after_all_forwards_on_a_grid_of_ranks(
    ranks: RankPool, mesh: tuple[int, int], wrapping: str
) -> None:
    case = Training(
        config=libra_pool(2, placement="paper", shard_layout="zigzag"),
        cp=mesh[1],
        recompute="blocks",
        wrapping=wrapping,
        order="forwards first",
        microbatches=2,
    )
    check(ranks, case)


@pytest.mark.parametrize(
    "mesh, evaluate, wrapping",
    [
        ((2, 1), "no_grad", "none"),
        ((2, 1), "no_grad", "ddp"),
        ((2, 1), "no_grad", "fsdp"),
        ((2, 1), "inference_mode", "none"),
        ((1, 2), "inference_mode", "ddp"),
        ((2, 2), "inference_mode", "ddp"),
        ((2, 2), "no_grad", "fsdp"),
        # Not FSDP in inference mode: it keeps buffers that a later training step then can't use.
    ],
)
def test_evaluation_between_steps_gives_the_loss_and_leaves_training_alone(
    ranks: RankPool, mesh: tuple[int, int], evaluate: str, wrapping: str
) -> None:
    case = Training(
        config=libra_pool(mesh[0]), cp=mesh[1], evaluate=evaluate, wrapping=wrapping, steps=2
    )
    check(ranks, case)
    if mesh == (1, 2):
        check(ranks, replace(case, config=ulysses()))


@pytest.mark.parametrize("mesh, wrapping", [((1, 2), "fsdp"), ((2, 2), "ddp")])
def test_ten_steps_have_equal_losses(ranks: RankPool, mesh: tuple[int, int], wrapping: str) -> None:
    case = Training(config=ulysses(), cp=mesh[1], wrapping=wrapping, steps=10)
    for changes in ({}, {"config": libra_pool(mesh[0]), "prefetch": True}):
        losses = check(ranks, replace(case, **changes))[0].losses
        assert len(set(losses)) == 10


@pytest.mark.parametrize("trains", ["blocks.0.attention.v_proj", "blocks.1", "norm"])
@pytest.mark.parametrize("mesh", [(2, 1)])
def test_parameters_may_be_frozen(ranks: RankPool, mesh: tuple[int, int], trains: str) -> None:
    case = Training(config=libra_pool(2), trains=trains, microbatches=2)
    for wrapping, recompute in (("none", "nothing"), ("ddp", "blocks"), ("fsdp", "nothing")):
        check(ranks, replace(case, wrapping=wrapping, recompute=recompute))


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_single_precision_steps_agree_as_closely_as_single_precision_can(
    ranks: RankPool, mesh: tuple[int, int]
) -> None:
    for config in (ulysses(), libra_pool(2)):
        check(ranks, Training(config=config, cp=mesh[1], microbatches=2, dtype=torch.float32))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("recompute", ["nothing", "blocks"])
@pytest.mark.parametrize("mesh", [(2, 1)])
def test_autocast_computes_attention_in_its_precision(
    ranks: RankPool, mesh: tuple[int, int], recompute: str
) -> None:
    case = Training(
        config=libra_pool(2),
        recompute=recompute,
        microbatches=2,
        autocast=True,
        dtype=torch.float32,
    )
    check(ranks, case, tolerance=0.1)
