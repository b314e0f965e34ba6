"""Attention of the decode step on a CPU: a row's bits do not depend on its neighbours, nor on the thread at work.

torch's fused CPU kernel gives each thread a scratch buffer whose alignment follows the thread's number. MKL's product
of an odd number of query heads depends on alignment: rows of the second thread differ from those of the first.
Here two batched products and a softmax take as long (105 us against 118 us for 64 rows of the quickstart model).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "tandem_decode"


def install_attention(model: PreTrainedModel) -> None:
    """Let a model attend with `attend`, which is sdpa for everybody else. transformers knows attention by name only."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """A transformers attention function. query [N, heads, queries, D]; key and value [N, key heads, T, D].

    The decode step of the engine is known by its one query and its mask of numbers [N, 1, 1, T].
    """
    rows, heads, queries, size = query.shape
    is_elsewhere = queries > 1 or query.device.type != "cpu"
    if is_elsewhere or attention_mask is None or attention_mask.dtype == torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped @ key.transpose(2, 3)).mul_(scaling).add_(attention_mask)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).reshape(rows, 1, heads, value.shape[-1]), None
