"""THE name table: each Hugging Face tensor, where it lies in Megatron-Core's model, and how tensor ranks cut it.

A Hugging Face tensor is a view of a part of one of ours (q, k and v lie in one weight, gate and up in another). So one
table serves to load, export, sync and save, for weights, moments and gradients alike. Qwen3-MoE would add rows for
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.config.models import MegatronBackend

FAMILIES = ("llama", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3")  # those whose frequencies do not depend on the length of the sequence
# A tensor of ours, on this rank -> the view of it that is the part of a Hugging Face tensor.
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One Hugging Face tensor. `homes` are (stage, parameter); the first is where it is read, all are written."""

    name: str
    shape: tuple[int, ...]
    homes: tuple[tuple[int, str], ...]
    view: View
    cut: int | None = None  # the dimension that tensor ranks share

    def part_shape(self, parts: int) -> tuple[int, ...]:
        """What one of so many tensor ranks has."""
        return tuple(size // parts if dim == self.cut else size for dim, size in enumerate(self.shape))

    def region(self, part: int, parts: int) -> tuple[slice, ...]:
        """Where that lies in the whole."""
        shape = self.part_shape(parts)
        return tuple(
            slice(part * size, (part + 1) * size) if dim == self.cut else slice(0, size)
            for dim, size in enumerate(shape)
        )


@dataclass(frozen=True)
class Heads:
    """How queries, keys and values lie in one weight: group by group, a group's queries, its key, its value."""

    queries: int  # of one group
    size: int

    def query(self, x: Tensor) -> Tensor:
        return self._groups(x)[:, : self.queries]

    def key(self, x: Tensor) -> Tensor:
        return self._groups(x)[:, self.queries : self.queries + 1]

    def value(self, x: Tensor) -> Tensor:
        return self._groups(x)[:, self.queries + 1 :]

    def _groups(self, x: Tensor) -> Tensor:
        return x.view(-1, self.queries + 2, self.size, *x.shape[1:])


def whole(x: Tensor) -> Tensor:
    """Nothing else lies in it."""
    return x


def gate(x: Tensor) -> Tensor:
    """The first half of the MLP's input weight."""
    return x[: len(x) // 2]


def up(x: Tensor) -> Tensor:
    """The second half."""
    return x[len(x) // 2 :]


def name_table(config: PreTrainedConfig, layers: Sequence[int], *, outputs: int, value: bool, tied: bool) -> list[Row]:
    """The rows of a decoder whose stages have so many `layers`; `outputs` of a value head or of an output layer."""
    c = config.get_text_config()
    last, hidden = len(layers) - 1, c.hidden_size
    embedding = [(0, "embedding.weight")]
    if tied and last > 0:  # each of the two stages that use it has a copy
        embedding.append((last, "head.lm_head.weight"))
    rows = [Row("model.embed_tokens.weight", (c.vocab_size, hidden), tuple(embedding), whole, cut=0)]
    number = 0
    for stage, count in enumerate(layers):
        for here in range(count):
            rows += _layer(c, number, stage, f"decoder.layers.{here}")
            number += 1
    rows.append(Row("model.norm.weight", (hidden,), ((last, "decoder.final_layernorm.weight"),), whole))
    if value:
        rows.append(Row("value_head.linear.weight", (outputs, hidden), ((last, "head.linear.weight"),), whole))
    elif not tied:
        rows.append(Row("lm_head.weight", (outputs, hidden), ((last, "head.lm_head.weight"),), whole, cut=0))
    return rows


def _layer(c: PreTrainedConfig, number: int, stage: int, ours: str) -> Iterator[Row]:
    hidden, inner = c.hidden_size, c.intermediate_size
    size = head_size(c)
    queries, keys = c.num_attention_heads * size, c.num_key_value_heads * size
    heads = Heads(c.num_attention_heads // c.num_key_value_heads, size)

    def row(name: str, place: str, shape: tuple[int, ...], view: View = whole, cut: int | None = None) -> Row:
        return Row(f"model.layers.{number}.{name}", shape, ((stage, f"{ours}.{place}"),), view, cut)

    qkv = (("q", queries, heads.query), ("k", keys, heads.key), ("v", keys, heads.value))
    for letter, width, view in qkv:
        yield row(f"self_attn.{letter}_proj.weight", "self_attention.linear_qkv.weight", (width, hidden), view, 0)
    if has_qkv_bias(c):
        for letter, width, view in qkv:
            yield row(f"self_attn.{letter}_proj.bias", "self_attention.linear_qkv.bias", (width,), view, 0)
    yield row("self_attn.o_proj.weight", "self_attention.linear_proj.weight", (hidden, queries), cut=1)
    if has_head_norms(c):
        for letter in "qk":
            yield row(f"self_attn.{letter}_norm.weight", f"self_attention.{letter}_layernorm.weight", (size,))
    yield row("mlp.gate_proj.weight", "mlp.linear_fc1.weight", (inner, hidden), gate, 0)
    yield row("mlp.up_proj.weight", "mlp.linear_fc1.weight", (inner, hidden), up, 0)
    yield row("mlp.down_proj.weight", "mlp.linear_fc2.weight", (hidden, inner), cut=1)
    yield row("input_layernorm.weight", "input_layernorm.weight", (hidden,))
    yield row("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", (hidden,))


def head_size(c: PreTrainedConfig) -> int:
    """Of one attention head."""
    return c.to_dict().get("head_dim") or c.hidden_size // c.num_attention_heads


def has_qkv_bias(c: PreTrainedConfig) -> bool:
    """Qwen2 has it whatever its config says."""
    return c.model_type == "qwen2"


def has_head_norms(c: PreTrainedConfig) -> bool:
    """Norms over each query and key."""
    return c.model_type == "qwen3"


def shapes_of(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Each name with an empty tensor of its shape."""
    return {row.name: torch.empty(row.shape, device="meta") for row in rows}


def check_model(model: PreTrainedModel, sizes: MegatronBackend) -> None:
    """Raise ValueError for a model that is not in the name table, or cannot be cut so."""
    c = model.config.get_text_config()
    if c.model_type not in FAMILIES:
        more = "experts (MoE) are not supported yet; " if "moe" in c.model_type else ""
        raise ValueError(
            f"backend.name=megatron knows the layers of {', '.join(FAMILIES)}; this model is {c.model_type}: "
            f"{more}set backend.name=torch"
        )
    values = c.to_dict()
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise ValueError(f"backend.name=megatron has no {name}, which this model sets: set backend.name=torch")
    if c.hidden_act != "silu":
        raise ValueError(f"backend.name=megatron knows hidden_act=silu, not {c.hidden_act}: set backend.name=torch")
    rope = model.base_model.get_submodule("rotary_emb")
    if rope.rope_type not in ROPES or rope.attention_scaling != 1.0:
        raise ValueError(
            f"backend.name=megatron knows the RoPE types {', '.join(ROPES)}, not {rope.rope_type}: "
            "set backend.name=torch"
        )
    tensor = sizes.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if values[name] % tensor:
            raise ValueError(
                f"backend.tensor_model_parallel_size={tensor} does not divide the model's {name}, {values[name]}"
            )


def layers_of_stages(layers: int, sizes: MegatronBackend) -> tuple[int, ...]:
    """How many layers each pipeline stage has: as many each, besides the first and last where those are set."""
    stages = sizes.pipeline_model_parallel_size
    first, last = sizes.num_layers_in_first_pipeline_stage, sizes.num_layers_in_last_pipeline_stage
    fixed = {stage: count for stage, count in ((0, first), (stages - 1, last)) if count is not None}
    rest, free = layers - sum(fixed.values()), stages - len(fixed)
    if rest < free or (rest % free if free else rest):
        raise ValueError(
            f"backend.pipeline_model_parallel_size={stages} with num_layers_in_first_pipeline_stage={first} and "
            f"num_layers_in_last_pipeline_stage={last} cannot share out the model's {layers} layers: what is left for "
            f"the other {free} stages must be a multiple of that number; set the two sizes"
        )
    return tuple(fixed.get(stage, rest // free if free else 0) for stage in range(stages))
