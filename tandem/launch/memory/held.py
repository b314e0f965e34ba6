"""What a trained or frozen model holds on a rank, in use and away, and what its passes add to it. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from tandem.launch.memory.activations import (
    F32,
    Passes,
    head_infer,
    head_kept,
    head_work,
    infer_work,
    kept,
    layer_work,
)
from tandem.launch.memory.sizes import ModelSize, Ranks

MOMENTS = 8  # bytes a weight of AdamW: two float32 numbers
BUCKET = 1 << 27  # bytes of a gradient that replicas add up in one call (train/torch/mesh.py)


@dataclass(frozen=True)
class Held:
    """Bytes of one GPU by what they are for."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    cache: int = 0  # keys and values of the engine, and all else that it takes
    buffers: int = 0  # weights on their way
    processes: int = 0  # CUDA's own, and what a sleeping engine keeps

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __add__(self, other: Held) -> Held:
        return Held(*(vars(self)[field.name] + vars(other)[field.name] for field in fields(self)))


@dataclass(frozen=True)
class Model:
    """One model of a run on its ranks. The fullest rank counts."""

    size: ModelSize
    ranks: Ranks
    training: Passes
    inference: Passes
    trained: bool
    offload: Literal["none", "optimizer", "all"]
    packs: int  # micro-batches of a mini-batch at most
    updates: int  # optimizer steps between two turns of another model
    gradient_waits: bool  # streaming adds it up while others compute
    gradient_number: int = F32  # bytes; Megatron-Core may keep less

    @property
    def is_megatron(self) -> bool:
        return self.training.backend == "megatron"

    @property
    def here(self) -> int:
        """Weights of the fullest rank."""
        size, t = self.size, self.ranks.tensor
        output = 0 if self.training.value else size.output
        if not self.is_megatron:
            whole = (size.embedding + output + size.layers * size.layer) // t + size.rest
            return whole // (self.ranks.same_part if self.ranks.sharded else 1)
        stages = [layers * size.layer // t for layers in self.ranks.stages(size.layers)]
        tied = size.embedding if self.ranks.pipeline > 1 and not size.output and not self.training.value else 0
        stages[0] += size.embedding // t
        stages[-1] += (output or tied) // t + size.rest
        return max(stages)

    def in_use(self, *, gradient: bool, optimizer: bool) -> Held:
        """Weights, and what is asked for where the model is trained. Megatron-Core's gradient has a place of its own.

        torch: float32 master and a copy in the precision of the passes, which FSDP makes anew instead. Megatron-Core:
        its float32 weights are the optimizer's, cut over the ranks with the same part.
        """
        b, n = self.training.number, self.here
        if not self.trained:
            return Held(weights=b * n)
        if self.is_megatron:
            stepped = (MOMENTS + (F32 if b < F32 else 0)) * n // self.ranks.same_part
            return Held(b * n, self.gradient_number * n, stepped * optimizer)
        apart = b if b < F32 and not self.ranks.sharded else 0
        return Held((F32 + apart) * n, F32 * n * gradient, MOMENTS * n * optimizer)

    @property
    def away(self) -> Held:
        """While another model computes, the engine writes, or its weights are read for engine or checkpoint."""
        if self.offload == "all":
            return Held()
        return self.in_use(gradient=self.gradient_waits, optimizer=self.trained and self.offload == "none")

    @property
    def building(self) -> int:
        """Bytes while it is made: torch lays the whole float32 model down first; then come copies, or parts."""
        if self.is_megatron:
            return self.in_use(gradient=True, optimizer=False).total
        b, whole = self.training.number, self.size.whole
        after = F32 * self.size.layer if self.ranks.sharded else b * self.here if b < F32 else 0
        return F32 * whole + after

    @property
    def inferring(self) -> Held:
        """Log-probs or values of one micro-batch."""
        base = self.in_use(gradient=self.gradient_waits, optimizer=self.trained and self.offload == "none")
        passes = self.inference
        work = infer_work(self.size, self.ranks, passes)
        head = head_kept(self.size, passes) * passes.tokens
        logits = head_infer(self.size, self.ranks, passes)
        taken = Held(activations=head, logits=logits) if head + logits > work else Held(activations=work)
        return base + self._gathered + taken

    @property
    def updating(self) -> Held:
        """The fullest moment of a mini-batch: at the head, in a layer, behind the passes, or in the optimizer step."""
        step = self.in_use(gradient=True, optimizer=True)
        if self.ranks.same_part > 1 and not self.ranks.sharded:
            step += Held(buffers=min(BUCKET, F32 * self.here) + F32 * self.size.largest // self.ranks.tensor)
        return max([step, *self.moments()], key=lambda held: held.total)

    def moments(self) -> list[Held]:
        """Of forward and backward: behind them, and while they run. The first micro-batch has no gradient yet."""
        base = self.in_use(gradient=True, optimizer=self.offload == "none" or self.updates > 1) + self._gathered
        early = base if self.packs > 1 or self.is_megatron else replace(base, gradients=0)
        embedding = self.training.number * self.size.embedding // self.ranks.tensor
        return [base + Held(activations=embedding), *(early + passes for passes in self._passes())]

    def _passes(self) -> list[Held]:
        """Of the first stage in a layer, of the last one in a layer and at the head."""
        size, ranks, passes = self.size, self.ranks, self.training
        stages = ranks.stages(size.layers)
        layer = kept(size, ranks, passes) * passes.tokens
        first, last = layer * stages[0] * min(ranks.pipeline, self.packs), layer * stages[-1]  # 1F1B: stages wait
        work = layer_work(size, ranks, passes)
        head, logits = head_work(size, ranks, passes)
        at_head = last + head + head_kept(size, passes) * passes.tokens
        return [Held(activations=max(first, last) + work), Held(activations=at_head, logits=logits)]

    @property
    def _gathered(self) -> Held:
        """What FSDP has put together: embedding and output layer, the layer that runs and the next; or all."""
        if not self.ranks.sharded:
            return Held()
        size, output = self.size, 0 if self.training.value else self.size.output
        ends = size.embedding + output + size.rest
        layers = size.layers if self.ranks.keep_gathered else 2
        return Held(weights=self.training.number * (ends + layers * size.layer) // self.ranks.tensor)
