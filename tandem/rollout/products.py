"""Matrix products in float32 on a CPU with AVX-512: oneDNN's, since MKL keeps to AVX2 on AMD.

Measured on a core of Zen 5, [64, 128] x [128, 768]: MKL 107 GFLOP/s, oneDNN 190; with 1,024 rows 111 and 250.
Of oneDNN's products too the rows are the same bits for any number of rows that is a multiple of 16, and of threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # (input, weight, bias)


def onednn(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """values @ weight.T + bias, without a gradient: the operator that torch's compiler writes for a linear layer."""
    return torch.ops.mkldnn._linear_pointwise.default(values, weight, bias, "none", [], "")


def best_product(model: PreTrainedModel) -> Product:
    """How this model multiplies here."""
    is_float32_on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    has_avx512 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return onednn if is_float32_on_cpu and has_avx512 else linear


class OneDnnLinear(nn.Linear):
    """A linear layer for inference that multiplies with oneDNN."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return onednn(input, self.weight, self.bias)


def install_products(model: PreTrainedModel) -> None:
    """Let every linear layer multiply in the best way. Layers, their names, parameters and hooks stay what they are."""
    if best_product(model) is not onednn:
        return
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = OneDnnLinear
