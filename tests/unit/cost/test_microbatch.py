"""Seconds of a layer and of a microbatch by hand."""

from __future__ import annotations

import numpy as np
import pytest

from libra.cost.microbatch import layer_seconds, microbatch_seconds, output_seconds
from tests.unit.cost.small_machine import CLUSTER, MODEL, SPARSE, SPREAD, spread


def test_a_layer_by_hand() -> None:
    layer = layer_seconds(MODEL, SPREAD, CLUSTER)
    assert layer.matmul == 32 * MODEL.layer_flops / 500
    assert layer.elementwise == 2 * 32 * MODEL.layer_elements * 2 / 100
    assert layer.exchanges == 0
    assert layer.forward == layer.matmul + layer.elementwise
    assert layer.backward == 2 * layer.forward


def test_tensor_and_expert_parallelism_move_the_stream_and_the_routed_tokens() -> None:
    layer = layer_seconds(SPARSE, spread(tp=2, ep=2), CLUSTER)
    stream = 32 * 8 * 2
    held = stream * 2 / 2  # two experts a token, two tp ranks
    assert layer.exchanges == 4 * (stream / 2 / 10 + 1) + 2 * (held / 2 / 10 + 1)
    assert layer.backward == 2 * (layer.matmul + layer.elementwise) + layer.exchanges
    assert layer.matmul == 32 * SPARSE.layer_flops / 2 / 500


def test_a_microbatch_is_its_layers_and_attention_and_its_backward_runs_the_forward_again() -> None:
    layer, output = layer_seconds(MODEL, SPREAD, CLUSTER), output_seconds(MODEL, SPREAD, CLUSTER)
    given_seconds = {"attention_forward": [1.0, 2.0], "attention_backward": [3.0, 5.0]}
    forward, backward = microbatch_seconds(MODEL, SPREAD, CLUSTER, **given_seconds)
    once = 4 * (layer.forward + np.array([1.0, 2.0]))
    twice = 4 * (layer.backward + np.array([3.0, 5.0]))
    assert forward[0] == pytest.approx(once + output.forward)
    assert backward[0] == pytest.approx(twice + once + output.backward)
    lean = spread(recompute="none", pp=2, dp=2)
    forward, backward = microbatch_seconds(MODEL, lean, CLUSTER, **given_seconds)
    assert forward[0] == pytest.approx(once / 2)
    assert backward[0] == pytest.approx(twice / 2)
    assert forward[1] - forward[0] == pytest.approx(output.forward)
