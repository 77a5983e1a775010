"""Presets against what their makers publish, and the counting behind them."""

from __future__ import annotations

import dataclasses

import pytest

from libra.cost.models import MODELS, Model

SMALL = Model(name="small", layers=2, hidden=8, q_heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=32)


@pytest.mark.parametrize(
    "name, parameters",
    [  # what the published weights hold (the totals of their safetensors files)
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_a_preset_has_as_many_parameters_as_were_published(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_parameters_by_hand() -> None:
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8
    layer = attention + 3 * 8 * 16 + 2 * 8
    assert SMALL.parameters == 2 * layer + 2 * 32 * 8 + 8
    tied = dataclasses.replace(SMALL, tied_embeddings=True, qk_norm=True)
    assert tied.parameters == 2 * (layer + 2 * 2) + 32 * 8 + 8


def test_experts_multiply_parameters_but_only_active_ones_work() -> None:
    sparse = dataclasses.replace(SMALL, experts=8, active_experts=2, shared_experts=1)
    expert = 3 * 8 * 16
    assert sparse.parameters == SMALL.parameters + 2 * (8 * expert + 8 * 8)
    assert sparse.layer_flops == 2 * (SMALL.attention_parameters + 8 * 8 + 3 * expert)


def test_work_is_two_operations_a_parameter_of_every_product() -> None:
    products = SMALL.parameters - 2 * 2 * 8 - 8 - 32 * 8  # no norms, no embedding look-up
    assert 2 * SMALL.layer_flops + SMALL.output_flops == 2 * products


def test_heads_of_a_worker_are_cut_by_tensor_parallelism() -> None:
    heads = MODELS["llama-3-70b"].heads(tp=4)
    assert (heads.q, heads.kv, heads.dim, heads.bytes) == (16, 2, 128, 2)
    assert MODELS["qwen3-30b-a3b"].heads(tp=8).kv == 1  # each held by two ranks
    with pytest.raises(ValueError, match="tp=3 does not fit"):
        SMALL.heads(tp=3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers": 0}, r"Model.layers is 0"),
        ({"hidden": 2.0}, r"Model.hidden is 2.0"),
        ({"kv_heads": 3}, "kv_heads 3 does not divide"),
        ({"active_experts": 2}, "2 of 1 experts"),
        ({"shared_experts": -1}, "shared_experts is -1"),
        ({"tied_embeddings": 1}, "true or false"),
        ({"name": ""}, "Model.name"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)  # type: ignore[arg-type]
