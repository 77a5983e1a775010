"""How a model is spread over GPUs, and which of its tensors training keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.config import check_fields
from libra.cost.models import Model
from libra.cost.pipeline import ScheduleName, check_schedule

Recompute = Literal["full", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes of every kind of parallelism.  Ranks count up tp first, then cp, dp and pp."""

    dp: int
    """Data-parallel replicas.  Must divide `global_batch`."""

    cp: int
    """Context-parallel ranks that share a pack.  Must divide `tokens`."""

    global_batch: int
    """Packs of one optimizer step."""

    tokens: int
    """L: tokens of a pack."""

    tp: int = 1
    """Tensor-parallel ranks, with sequence parallelism between the products."""

    pp: int = 1
    """Pipeline stages."""

    ep: int = 1
    """Expert-parallel ranks: neighbouring cp x dp ranks that share the routed experts.  Must divide
    cp x dp.
    """

    schedule: ScheduleName = "1f1b"
    """Pipeline schedule: `gpipe`, `1f1b` or `interleaved`."""

    virtual_stages: int = 1
    """Model chunks of one pipeline rank; more than 1 for `interleaved` only."""

    recompute: Recompute = "full"
    """`full` keeps each layer's input and runs its forward again in backward; `none` keeps all."""

    element_bytes: int = 2
    """Bytes of a parameter and of an activation: bf16."""

    gradient_bytes: int = 4
    """Bytes of a gradient, as accumulated and as reduced: fp32."""

    optimizer_bytes: int = 12
    """Bytes of a parameter's optimizer state: fp32 master copy and two Adam moments."""

    gradient_overlap: float = 0.5
    """Share of the gradient exchange hidden behind the last backward and the first forward.
    Default: an assumption.
    """

    loss_rows: int = 4096
    """Tokens whose logits exist at one time on the last stage.  Default: an assumption, a loss
    computed in pieces.
    """

    def __post_init__(self) -> None:
        check_fields(self, zero=("gradient_overlap",), shares=("gradient_overlap",))
        # Sizes that do not divide would leave ranks without work, or work without ranks.
        for name, of, whole in (
            ("dp", "global_batch", self.global_batch),
            ("cp", "tokens", self.tokens),
            ("ep", "cp x dp", self.cp * self.dp),
        ):
            if whole % getattr(self, name):
                raise ValueError(
                    f"Parallelism.{name} {getattr(self, name)} does not divide {of} {whole}"
                )
        check_schedule(self.schedule, self.pp, self.microbatches, self.virtual_stages)

    @property
    def microbatches(self) -> int:
        """GA: packs of one replica in a step."""
        return self.global_batch // self.dp

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def rows(self) -> int:
        """Tokens of a pack that one context-parallel rank holds."""
        return self.tokens // self.cp

    @property
    def chunks(self) -> int:
        """Model chunks of the whole pipeline."""
        return self.pp * self.virtual_stages

    def chunk_layers(self, model: Model) -> int:
        """Layers of one model chunk.  ValueError for a model that cannot be spread so."""
        if model.layers % self.chunks:
            raise ValueError(
                f"pp x virtual_stages = {self.chunks} does not divide the {model.layers} layers of "
                f"{model.name}"
            )
        if model.experts % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide the {model.experts} experts of {model.name}"
            )
        model.heads(tp=self.tp)  # refuses a tp that does not fit the heads
        return model.layers // self.chunks
