"""How an engine's model multiplies: with oneDNN where that is faster, else as torch does by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from tandem import onednn

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # (input, weight, bias)


def best_product(model: PreTrainedModel) -> Product:
    """The faster one for this model here."""
    is_float32_on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return onednn.linear if is_float32_on_cpu and onednn.pays() else functional.linear


class OneDnnLinear(nn.Linear):
    """A linear layer for inference that multiplies with oneDNN."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return onednn.linear(input, self.weight, self.bias)


def install_products(model: PreTrainedModel) -> None:
    """Let every linear layer multiply in the best way. Layers, their names, parameters and hooks stay what they are."""
    if best_product(model) is not onednn.linear:
        return
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = OneDnnLinear
