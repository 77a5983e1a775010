"""Seconds of a layer, a microbatch and a step: by hand in small cases, by relations in all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost import step_seconds
from libra.cost.step import (
    gradient_seconds,
    layer_seconds,
    microbatch_seconds,
    optimizer_seconds,
    output_seconds,
)
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
    attention = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    forward, backward = microbatch_seconds(MODEL, SPREAD, CLUSTER, attention)
    once = 4 * (layer.forward + np.array([1.0, 2.0]))
    twice = 4 * (layer.backward + np.array([3.0, 5.0]))
    assert forward[0] == pytest.approx(once + output.forward)
    assert backward[0] == pytest.approx(twice + once + output.backward)
    lean = spread(recompute="none", pp=2, dp=2)
    forward, backward = microbatch_seconds(MODEL, lean, CLUSTER, attention)
    assert forward[0] == pytest.approx(once / 2)
    assert backward[0] == pytest.approx(twice / 2)
    assert forward[1] - forward[0] == pytest.approx(output.forward)


def test_gradients_and_parameters_cross_once_and_states_are_read_and_written() -> None:
    count, ranks = MODEL.parameters, 8
    assert gradient_seconds(MODEL, SPREAD, CLUSTER) == pytest.approx(
        count * 6 * 7 / 8 / (4 * 2) + 2 * 3 * 3
    )
    assert optimizer_seconds(MODEL, SPREAD, CLUSTER) == pytest.approx(
        count / ranks * (4 + 24 + 2) / 100
    )
    routed = 4 * SPARSE.routed_layer_parameters / 4
    dense = SPARSE.parameters - 4 * routed
    assert optimizer_seconds(SPARSE, spread(ep=4), CLUSTER) == pytest.approx(
        (dense / 8 + routed / 2) * 30 / 100
    )


def compose(forward, backward, **changes):
    pool = changes.pop("pool_size", 1)
    return step_seconds(
        MODEL,
        spread(**changes),
        CLUSTER,
        attention_forward=forward,
        attention_backward=backward,
        pool_size=pool,
    )


# [GA, DP]: two indices of four replicas; sums over indices 6, 3, 4, 4; slowest 5 and 3.
ATTENTION = np.array([[5.0, 1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 2.0]])


def linear(recompute: int = 2) -> float:
    """Both microbatches without attention."""
    layer, output = layer_seconds(MODEL, SPREAD, CLUSTER), output_seconds(MODEL, SPREAD, CLUSTER)
    one = 4 * (recompute * layer.forward + layer.backward) + output.forward + output.backward
    return 2 * one


def test_without_pools_the_slowest_sum_counts_and_in_lockstep_the_sum_of_the_slowest() -> None:
    none = np.zeros((2, 4))
    step = compose(ATTENTION, none)
    # Every attention second happens in four layers, forward and recomputed.
    assert step.free == pytest.approx(linear() + 8 * 6)
    assert step.lockstep == pytest.approx(linear() + 8 * (5 + 3))
    assert step.bubble_share == pytest.approx(0)
    assert compose(none, ATTENTION).free == pytest.approx(linear() + 4 * 6)


def test_members_of_a_pool_wait_for_each_other_at_every_index() -> None:
    none = np.zeros((2, 4))
    assert compose(ATTENTION, none, pool_size=2).free == pytest.approx(linear() + 8 * (5 + 2))
    whole = compose(ATTENTION, none, pool_size=4)
    assert whole.free == pytest.approx(linear() + 8 * 8)
    assert whole.free == pytest.approx(whole.lockstep)


def test_a_step_adds_what_is_not_hidden_of_the_gradients_and_the_optimizer() -> None:
    step = compose(ATTENTION, ATTENTION, gradient_overlap=0.75)
    assert step.gradients == pytest.approx(gradient_seconds(MODEL, SPREAD, CLUSTER) / 4)
    assert step.seconds == step.free + step.gradients + step.optimizer
    assert step.lockstep_seconds == step.lockstep + step.gradients + step.optimizer
    assert step.tokens_per_second == 8 * 64 / step.seconds


@pytest.mark.parametrize("schedule, virtual", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_with_stages_a_pool_takes_its_schedules_makespan(schedule: str, virtual: int) -> None:
    changes = {"pp": 2, "schedule": schedule, "virtual_stages": virtual}
    step = compose(ATTENTION, 2 * ATTENTION, **changes)
    alone = [
        compose(
            np.tile(ATTENTION[:, [replica]], 4), np.tile(2 * ATTENTION[:, [replica]], 4), **changes
        )
        for replica in range(4)
    ]
    assert step.free == pytest.approx(max(one.free for one in alone))
    assert step.bubble_share == pytest.approx(alone[0].bubble_share)
    assert 0 < step.bubble_share < 1


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_waiting_for_more_never_makes_a_step_shorter(seed: int, pool: int, pp: int) -> None:
    forward, backward = np.random.default_rng(seed).random((2, 2, 4))
    alone = compose(forward, backward, pp=pp)
    pooled = compose(forward, backward, pp=pp, pool_size=pool)
    assert alone.free <= pooled.free * (1 + 1e-12)
    assert pooled.free <= pooled.lockstep * (1 + 1e-12)
    assert pooled.lockstep == pytest.approx(alone.lockstep)


def test_equal_attention_makes_all_ways_of_waiting_alike() -> None:
    equal = np.full((2, 4), 3.0)
    step = compose(equal, equal, pool_size=2)
    assert step.free == pytest.approx(step.lockstep)


@pytest.mark.parametrize(
    "forward, changes, message",
    [
        (np.zeros((4, 2)), {}, r"shape \(4, 2\); it must be \(2, 4\), from global_batch"),
        (-ATTENTION, {}, "finite and >= 0"),
        (ATTENTION * np.nan, {}, "is nan; it must be finite"),
        (ATTENTION, {"pool_size": 3}, "pool_size 3 does not divide dp 4"),
        (ATTENTION, {"pool_size": 0}, "pool_size is 0"),
        (ATTENTION, {"pp": 3}, "does not divide the 4 layers"),
        (ATTENTION, {"tp": 3}, "tp=3 does not fit"),
        (ATTENTION, {"ep": 8}, "ep=8 does not divide the 1 experts"),
    ],
)
def test_what_does_not_fit_is_refused(forward, changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(forward, np.zeros((2, 4)), **changes)
