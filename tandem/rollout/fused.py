"""The forward pass of Llama's family in fewer operations: what a decode step on a CPU spends its time on.

The queries, keys and values of a layer are one product, so are gate and up; angles come from a table; none of
transformers' modules between the embedding and the head is called. The weights are the model's own parameters: those
that are multiplied at once lie one behind the other, and the parameters are views of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

from tandem.rollout.attention import attend
from tandem.rollout.kv_cache import DecodeView, PrefillView

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # (input, weight, bias)
# By name: importing the four of them takes longer than fusing saves in a run's first steps.
FAMILY = [
    f"transformers.models.{kind}.modeling_{kind}.{name}ForCausalLM"
    for kind, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))
]
FIXED_ANGLES = ("default", "linear", "llama3", "yarn")  # other kinds of angles change with the length of the text


def is_fusible(model: PreTrainedModel) -> bool:
    """Of the family, as transformers has it, in float32 on a CPU: that is where these operations were measured."""
    name = f"{type(model).__module__}.{type(model).__name__}"
    if name not in FAMILY or model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    return model.config.hidden_act == "silu" and model.config.rope_parameters["rope_type"] in FIXED_ANGLES


class FusedForward:
    """Takes what the model takes, gives its logits after the last position. The weights may be loaded in place."""

    def __init__(self, model: PreTrainedModel, max_length: int, product: Product) -> None:
        """Texts stay within `max_length` positions. The model belongs to this object: no second one may take it."""
        assert is_fusible(model)
        inner = model.model
        self._embed, self._norm, self._head = inner.embed_tokens, inner.norm, model.lm_head
        self._layers = [FusedLayer(layer, model.config.num_key_value_heads, product) for layer in inner.layers]
        cos, sin = inner.rotary_emb(self._norm.weight, torch.arange(max_length)[None])
        # A half turn swaps the halves of a head and negates the first: here the sine has that sign.
        half = sin.shape[-1] // 2
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, view: PrefillView | DecodeView
    ) -> torch.Tensor:
        """tokens and positions [N, T], mask [N or 1, 1, T, seen] -> logits [N, V]."""
        hidden = self._embed(tokens)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        for layer in self._layers:
            hidden = layer(hidden, cos, sin, mask, view)
        return self._head(normed(hidden[:, -1], self._norm))


class FusedLayer:
    """A decoder layer's parameters, and its forward pass. What the family's layers share bears Llama's names."""

    def __init__(self, layer: LlamaDecoderLayer, key_heads: int, product: Product) -> None:
        attention: Any = layer.self_attn
        self._attention, self._size = attention, int(attention.head_dim)
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms = (attention.q_norm, attention.k_norm) if attention.config.model_type == "qwen3" else None
        self._key_heads = key_heads
        self._product = product
        self._qkv = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = side_by_side([layer.mlp.gate_proj, layer.mlp.up_proj])
        self._o, self._down = attention.o_proj, layer.mlp.down_proj

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
        view: PrefillView | DecodeView,
    ) -> torch.Tensor:
        """hidden [N, T, H] -> the same; cos and sin [N, T, 1, D], the sine with the sign of its half."""
        context = self._attend(normed(hidden, self._norms[0]), cos, sin, mask, view)
        hidden = self._product(context, self._o.weight, self._o.bias).add_(hidden)
        gate, up = self._product(normed(hidden, self._norms[1]), *self._gate_up).chunk(2, -1)
        return self._product(silu(gate).mul_(up), self._down.weight, self._down.bias).add_(hidden)

    def _attend(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
        view: PrefillView | DecodeView,
    ) -> torch.Tensor:
        qkv = self._product(hidden, *self._qkv).unflatten(-1, (-1, self._size))
        rotated, values = qkv[:, :, : -self._key_heads], qkv[:, :, -self._key_heads :]
        if self._head_norms is not None:
            pair = rotated[:, :, : -self._key_heads], rotated[:, :, -self._key_heads :]
            rotated = torch.cat([normed(part, norm) for part, norm in zip(pair, self._head_norms, strict=True)], 2)
        rotated = (rotated * cos).addcmul_(rotated.roll(self._size // 2, -1), sin)
        queries, keys = rotated[:, :, : -self._key_heads], rotated[:, :, -self._key_heads :]
        seen = view.update(keys.transpose(1, 2), values.transpose(1, 2), self._attention.layer_idx)
        context, _ = attend(self._attention, queries.transpose(1, 2), *seen, mask, scaling=self._attention.scaling)
        return context.flatten(2)


def normed(values: torch.Tensor, norm: LlamaRMSNorm) -> torch.Tensor:
    return rms_norm(values, norm.weight.shape, norm.weight, norm.variance_epsilon)


def side_by_side(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of one layer that does the work of these, which become parts of it: no weight is held twice."""
    weight = in_one([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers))
    return weight, in_one(biases) if biases else None


def in_one(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parameters one behind the other, as views of the tensor that is returned."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
