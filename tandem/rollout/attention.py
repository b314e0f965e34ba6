"""Attention of the decode step on a CPU: a row's bits depend neither on its neighbours nor on the thread that computes it.

torch's fused CPU kernel gives each thread a scratch buffer whose alignment follows the thread's number, and MKL's product
of an odd number of query heads depends on alignment: rows of the second thread differ from those of the first.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "tandem_decode"


def install_attention(model: PreTrainedModel) -> None:
    """Let a model that the engine owns attend with `attend`; transformers knows attention functions by name only."""
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """query [N, heads, queries, D], key and value [N, key heads, T, D], mask [N, 1, 1, T]: a transformers attention function."""
    rows, heads, queries, size = query.shape
    if queries > 1 or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    assert attention_mask is not None, "decoding needs the mask of each row's own length"
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped @ key.transpose(2, 3)).mul_(scaling).add_(attention_mask)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).reshape(rows, 1, heads, value.shape[-1]), None
