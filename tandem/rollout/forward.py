"""A forward pass as the decode batch calls it: any causal LM as it is, Llama's family in fewer operations."""

from __future__ import annotations

import inspect
from typing import Protocol

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from tandem import onednn
from tandem.rollout.fused import FusedForward, is_fusible
from tandem.rollout.kv_cache import DecodeView, PrefillView


class Forward(Protocol):
    """tokens and positions [N, T], mask [N or 1, 1, T, seen] that is added -> logits [N, V] after the last position."""

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, view: PrefillView | DecodeView
    ) -> torch.Tensor: ...


class ModuleForward:
    """The model as it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # transformers 5.24 renamed past_key_values to cache.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, view: PrefillView | DecodeView
    ) -> torch.Tensor:
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: view},
        )
        return output.logits[:, -1]


def forward_of(model: PreTrainedModel, max_length: int) -> Forward:
    """The quickest for this model here; texts stay within `max_length` positions."""
    if not is_fusible(model):
        return ModuleForward(model)
    return FusedForward(model, max_length, onednn.linear if onednn.pays(model.device, model.dtype) else linear)
