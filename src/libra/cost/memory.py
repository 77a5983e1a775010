"""Bytes that one GPU holds at the worst moment of a step.

- Parameters and gradients of its model chunks, sharded by tp, and the routed experts by ep too.
- Optimizer states, spread over all ranks that hold the same parameters (cp x dp of them, ep times
  fewer for experts), as a distributed optimizer (ZeRO stage 1) does.
- Activations.  With recomputation each layer keeps its input for every microbatch between its
  forward and its backward, and one layer at a time keeps all its activations; without
  recomputation every layer does.  The schedule's order determines the number of microbatches.
- Logits and their gradients, of `loss_rows` tokens at a time, on the last stage.
- Tensors that Libra fetches, which are kept as long as activations, and Libra's workspace, which
  all layers share.

Simplifications.  While one layer keeps all its activations, as many gradients exist with them.
Activations that every tp rank needs whole are counted as sharded (sequence parallelism).  Weights
gathered for a product and communication buffers are part of `Cluster.usable_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.cost.models import Model
from libra.cost.parallelism import Parallelism
from libra.cost.pipeline import most_in_flight, schedule_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of one rank."""

    dense: float
    """Held by every cp x dp rank of the same tp and pp place."""
    routed: float
    """Routed experts: held by every cp x dp / ep of them."""
    owned: float
    """Those whose optimizer state the rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one GPU at the worst moment of a step."""

    parameters: float
    gradients: float
    optimizer: float
    kept: float
    """Activations that wait for their backward."""
    working: float
    """Activations and gradients of the layer that is being computed."""
    logits: float
    fetched: float
    """Tensors that attention keeps of other workers, and for them."""
    workspace: float
    """Tensors that one call of attention at a time allocates for transfers and gradients."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        states = self.parameters + self.gradients + self.optimizer
        attention = self.fetched + self.workspace
        return states + self.kept + self.working + self.logits + attention


def rank_parameters(model: Model, parallelism: Parallelism, *, stage: int) -> Parameters:
    """Parameters of a rank of pipeline stage `stage`, whose chunks are all its virtual stages.

    The first stage has the embedding, the last the last norm and the output projection (a copy of
    the embedding if it is tied).  ValueError for a model that cannot be spread so.
    """
    # Step 1: parameters of the whole stage, before they are sharded.
    layers = parallelism.chunk_layers(model) * parallelism.virtual_stages
    dense = layers * model.dense_layer_parameters
    if stage == 0:
        dense += model.embedding_parameters
    if stage == parallelism.pp - 1:
        dense += model.hidden
        if not model.tied_embeddings or parallelism.pp > 1:
            dense += model.embedding_parameters
    # Step 2: the shard of one rank.
    dense_shard = dense / parallelism.tp
    routed_shard = layers * model.routed_layer_parameters / (parallelism.tp * parallelism.ep)
    # Step 3: cp x dp ranks hold the same dense shard, and ep times fewer the same experts; each of
    # them owns an equal part of the optimizer's states.
    replicas = parallelism.cp * parallelism.dp
    owned = dense_shard / replicas + routed_shard * parallelism.ep / replicas
    return Parameters(dense=dense_shard, routed=routed_shard, owned=owned)


def rank_memory(
    model: Model,
    parallelism: Parallelism,
    *,
    fetched: float = 0.0,
    workspace: float = 0.0,
    stage: int | None = None,
) -> RankMemory:
    """Memory of a rank of `stage`, or of the stage that needs most.

    `fetched` are the bytes that a call of attention keeps for its backward beyond a rank's own
    tensors, at the worst worker: without recomputation every layer keeps them.  `workspace` are
    the bytes that all calls share, one call at a time.
    """
    if stage is None:
        every = (
            rank_memory(model, parallelism, fetched=fetched, workspace=workspace, stage=stage)
            for stage in range(parallelism.pp)
        )
        return max(every, key=lambda memory: memory.total)
    mine = rank_parameters(model, parallelism, stage=stage)
    # Step 1: layers whose activations wait for their backward, from the schedule's order; 1F1B on 4
    # stages with many microbatches keeps 4 microbatches on the first stage and 1 on the last.
    order = schedule_order(
        parallelism.schedule,
        parallelism.pp,
        parallelism.microbatches,
        virtual_stages=parallelism.virtual_stages,
    )
    layers = most_in_flight(order[stage]) * parallelism.chunk_layers(model)
    # Step 2: bytes of one element of every token (`row`), and of all activations of a layer.
    row = parallelism.rows * parallelism.element_bytes / parallelism.tp
    layer = row * model.layer_elements
    keeps_all = parallelism.recompute == "none"
    # Step 3: logits of `loss_rows` tokens, as elements and once more in fp32 for the loss.
    loss_rows = min(parallelism.loss_rows, parallelism.rows)
    logits = loss_rows * model.vocab * (parallelism.element_bytes + 4) / parallelism.tp
    return RankMemory(
        parameters=(mine.dense + mine.routed) * parallelism.element_bytes,
        gradients=(mine.dense + mine.routed) * parallelism.gradient_bytes,
        optimizer=mine.owned * parallelism.optimizer_bytes,
        kept=layers * (layer if keeps_all else row * model.hidden),
        working=layer if keeps_all else 2 * layer,
        logits=logits if stage == parallelism.pp - 1 else 0.0,
        fetched=fetched * (layers if keeps_all else 1),
        workspace=workspace,
    )
