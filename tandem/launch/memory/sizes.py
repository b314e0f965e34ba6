"""What a memory plan knows of a model and of the ranks that hold it: counts of weights and widths, no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from tandem.train.flops import FAMILIES


@dataclass(frozen=True)
class ModelSize:
    """Counts of weights, and the widths that activations have."""

    embedding: int
    output: int  # of an output layer of its own; 0 where it is the embedding
    layer: int  # of one layer
    layers: int
    rest: int  # what is left: the last norm
    largest: int  # of the largest tensor
    hidden: int
    heads: int
    query: int  # heads x head size
    key: int  # key heads x head size: of keys, and of values
    intermediate: int
    vocabulary: int
    family: str

    @property
    def whole(self) -> int:
        """All weights of the language model."""
        return self.embedding + self.output + self.layers * self.layer + self.rest

    @property
    def is_known(self) -> bool:
        """Whether its layers are those that the formulas were derived from: grouped queries and a gated MLP."""
        return self.family in FAMILIES


def size_of(model: PreTrainedModel) -> ModelSize:
    """Of a model, which may lie on the device `meta`."""
    config = model.config.get_text_config()
    values = config.to_dict()
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    own_output = output is not None and vars(output)["_parameters"]["weight"] is not _weight(embedding)
    head_size = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    numbers = {id(p): p.numel() for p in model.parameters()}
    in_layers = sum(p.numel() for stack in _layer_stacks(model, config.num_hidden_layers) for p in stack.parameters())
    first, last = _weight(embedding).numel(), _weight(output).numel() if own_output and output is not None else 0
    return ModelSize(
        embedding=first,
        output=last,
        layer=in_layers // config.num_hidden_layers,
        layers=config.num_hidden_layers,
        rest=sum(numbers.values()) - in_layers - first - last,
        largest=max(numbers.values()),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        query=head_size * config.num_attention_heads,
        key=head_size * (values.get("num_key_value_heads") or config.num_attention_heads),
        intermediate=values.get("intermediate_size") or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        family=config.model_type,
    )


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.get_parameter("weight")
    assert isinstance(weight, nn.Parameter), "of an embedding, or of a linear map"
    return weight


def _layer_stacks(model: PreTrainedModel, layers: int) -> list[nn.ModuleList]:
    """The decoder's layers: the outermost lists of that length."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == layers and not inside:
            found[name] = module
    if not found:
        raise ValueError(f"{type(model).__name__} has no list of its {layers} layers: its memory cannot be planned")
    return list(found.values())


@dataclass(frozen=True)
class Ranks:
    """How one model lies on its ranks. One rank has 1 / (tensor x pipeline) of the model."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    samples: int = 1  # shares of the samples: ranks beyond tensor x context x pipeline
    first_stage: int | None = None  # layers; None: as many as any other stage
    last_stage: int | None = None
    sequence_parallel: bool = False
    sharded: bool = False  # FSDP over the ranks with the same part of a layer
    keep_gathered: bool = False

    @property
    def same_part(self) -> int:
        """Ranks that have the same part of each layer."""
        return self.context * self.samples

    @property
    def between(self) -> int:
        """Into how many parts tokens are cut between a layer's products."""
        return self.tensor if self.sequence_parallel else 1

    def stages(self, layers: int) -> list[int]:
        """Layers of each pipeline stage."""
        ends = {0: self.first_stage, self.pipeline - 1: self.last_stage} if self.pipeline > 1 else {}
        given = {stage: count for stage, count in ends.items() if count is not None}
        inner = max(1, self.pipeline - len(given))
        even = math.ceil((layers - sum(given.values())) / inner)
        return [given.get(stage, even) for stage in range(self.pipeline)]
