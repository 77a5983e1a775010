"""Bytes of a GPU by hand, and the preset models on the preset clusters."""

from __future__ import annotations

import dataclasses

from libra.cost import CLUSTERS, MODELS, Parallelism, rank_memory
from libra.cost.memory import rank_parameters
from tests.unit.cost.small_machine import MODEL, SPARSE, SPREAD, spread


def test_memory_of_one_stage_by_hand() -> None:
    memory = rank_memory(MODEL, SPREAD, fetched=1000.0, workspace=300.0)
    count = MODEL.parameters
    assert memory.parameters == 2 * count
    assert memory.gradients == 4 * count
    assert memory.optimizer == 12 * count / 8
    assert memory.kept == 1 * 4 * 32 * 8 * 2  # one microbatch, layers, rows, hidden, bytes
    assert memory.working == 2 * 32 * MODEL.layer_elements * 2
    assert memory.logits == 32 * 32 * (2 + 4)
    assert (memory.fetched, memory.workspace) == (1000, 300)
    parts = [getattr(memory, field.name) for field in dataclasses.fields(memory)]
    assert memory.total == sum(parts)


def test_without_recomputation_every_layer_keeps_all_and_what_it_fetched() -> None:
    whole = spread(recompute="none")
    memory = rank_memory(MODEL, whole, fetched=1000.0, workspace=300.0)
    assert memory.kept == 4 * 32 * MODEL.layer_elements * 2
    assert (memory.fetched, memory.workspace) == (4000, 300)


def test_every_parameter_is_on_some_rank_once_for_all_its_shards() -> None:
    for model in (MODEL, SPARSE, dataclasses.replace(MODEL, tied_embeddings=True)):
        for changes in ({"pp": 1}, {"pp": 2, "tp": 2}, {"pp": 4, "ep": 4, "tp": 2}):
            if model.experts % changes.get("ep", 1):
                continue
            parallelism = spread(**changes)
            held = [
                rank_parameters(model, parallelism, stage=stage) for stage in range(parallelism.pp)
            ]
            total = sum(one.dense + one.routed * parallelism.ep for one in held) * parallelism.tp
            copies = model.embedding_parameters if model.tied_embeddings else 0
            assert total == model.parameters + (copies if parallelism.pp > 1 else 0)


def test_1f1b_keeps_fewer_activations_on_later_stages_and_gpipe_all() -> None:
    kept = {
        schedule: [
            rank_memory(
                MODEL,
                spread(pp=4, dp=1, schedule=schedule),
                stage=stage,
            ).kept
            / (32 * 8 * 2)
            for stage in range(4)
        ]
        for schedule in ("1f1b", "gpipe", "interleaved")
    }
    assert kept == {"1f1b": [4, 3, 2, 1], "gpipe": [8] * 4, "interleaved": [7, 5, 3, 1]}


def test_the_worst_stage_is_reported() -> None:
    parallelism = spread(pp=2)
    stages = [rank_memory(MODEL, parallelism, stage=stage).total for stage in range(2)]
    assert rank_memory(MODEL, parallelism).total == max(stages)


def test_an_h100_cannot_hold_llama_70b_unless_it_is_spread() -> None:
    alone = Parallelism(dp=16, cp=8, global_batch=128, tokens=1 << 18)
    model, room = MODELS["llama-3-70b"], CLUSTERS["h100"].tensor_bytes
    assert rank_memory(model, alone).total > room
    assert rank_memory(model, dataclasses.replace(alone, tp=8, pp=4)).total < room
