"""Memory and seconds of a step: by hand in small cases, and what must hold in all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config import PoolConfig
from libra.cost import (
    CLUSTERS,
    MODELS,
    Cluster,
    Model,
    Parallelism,
    rank_memory,
    step_seconds,
)
from libra.cost.collectives import exchange_seconds, hop_seconds, ring_seconds
from libra.cost.memory import rank_parameters
from libra.cost.microbatch import layer_seconds, microbatch_seconds, output_seconds
from libra.cost.step import gradient_seconds, optimizer_seconds

MODEL = Model(name="small", layers=4, hidden=8, q_heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=32)
SPARSE = dataclasses.replace(MODEL, experts=8, active_experts=2)
SPREAD = Parallelism(dp=4, cp=2, global_batch=8, tokens=64)
# Round numbers: 10 bytes/s near, 2 far, a second of latency near and three far.
CLUSTER = Cluster(
    name="test",
    peak_flops=1000.0,
    memory_bytes=1e6,
    memory_bandwidth=100.0,
    within_node=10.0,
    between_nodes=2.0,
    within_node_latency=1.0,
    between_nodes_latency=3.0,
    ranks_per_node=4,
    matmul_fraction=0.5,
    collective_efficiency=1.0,
)


def spread(**changes: object) -> Parallelism:
    return dataclasses.replace(SPREAD, **changes)  # type: ignore[arg-type]


def test_a_group_inside_a_node_moves_its_bytes_over_the_links_within() -> None:
    assert ring_seconds(80.0, 4, CLUSTER) == 60 / 10 + 2 * 1
    assert ring_seconds(80.0, 1, CLUSTER) == 0
    assert ring_seconds(80.0, 2, CLUSTER, stride=2) == 40 / 10 + 1


def test_a_group_over_nodes_is_as_fast_as_the_ports_its_members_of_a_node_have() -> None:
    assert ring_seconds(80.0, 8, CLUSTER) == 70 / 8 + 3 * 3  # four ports
    assert ring_seconds(80.0, 8, CLUSTER, stride=2) == 70 / 4 + 3 * 3
    assert ring_seconds(80.0, 8, CLUSTER, stride=64) == 70 / 2 + 3 * 3


def test_an_exchange_takes_as_long_as_its_slower_link() -> None:
    assert exchange_seconds(80.0, 4, CLUSTER) == 60 / 10 + 2
    assert exchange_seconds(80.0, 8, CLUSTER) == max(30 / 10, 40 / 2) + 9
    assert exchange_seconds(80.0, 1, CLUSTER) == 0


def test_a_hop_crosses_nodes_when_its_stride_does() -> None:
    assert hop_seconds(20.0, CLUSTER, stride=2) == 2 + 1
    assert hop_seconds(20.0, CLUSTER, stride=4) == 10 + 3


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
    assert step.attention == 5 + 3
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
        (np.zeros((4, 2)), {}, r"shape \(4, 2\)"),
        (-ATTENTION, {}, "finite seconds >= 0"),
        (ATTENTION * np.nan, {}, "finite seconds >= 0"),
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


def test_a_pool_has_the_nodes_of_its_cluster_unless_it_names_its_own() -> None:
    assert CLUSTER.with_nodes(PoolConfig(), tp=2).ranks_per_node == 2
    assert CLUSTER.with_nodes(PoolConfig(), tp=8).ranks_per_node == 1
    assert CLUSTER.with_nodes(PoolConfig(ranks_per_node=16), tp=2).ranks_per_node == 16
