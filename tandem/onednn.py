"""float32 matrix products on a CPU through oneDNN, where that is faster than what torch takes by itself.

torch gives them to MKL, which runs AVX2 code on AMD processors, whatever they can. Measured on a core of an AMD EPYC
with AVX-512, [64, 128] x [128, 768]: MKL 107 GFLOP/s, oneDNN 190; with 1,024 rows 111 and 250. Of oneDNN's products too
the rows are the same bits for any number of rows that is a multiple of 16, and for any number of threads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# What a product is to torch's dispatcher.
OPERATORS = frozenset({torch.ops.mkldnn._linear_pointwise.default} if torch.backends.mkldnn.is_available() else ())


def pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products there are faster so."""
    return device.type == "cpu" and dtype == torch.float32 and is_amd_with_avx512()


@cache
def is_amd_with_avx512() -> bool:
    """Whether MKL leaves half of this process's CPU unused."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    about = Path("/proc/cpuinfo")
    return about.is_file() and "AuthenticAMD" in about.read_text()


def use(model: nn.Module) -> None:
    """Let the linear maps of a model compute so, forward and backward. Their names, parameters and hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = Linear(module)


def linear(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """values @ weight.T + bias, without a graph: the operator that torch's compiler writes for a linear layer."""
    return torch.ops.mkldnn._linear_pointwise.default(values, weight, bias, "none", [], "")


class Linear:
    """The forward pass of a linear map."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, input: Tensor) -> Tensor:  # named as in the forward pass that it stands for
        return _Product.apply(input, self._module.weight, self._module.bias)


class _Product(torch.autograd.Function):
    """x [..., I], weight [O, I], bias [O] or None -> x weight^T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = gradients, ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        grad_x = linear(grad, weight.t(), None) if need_x else None
        grad_weight = linear(rows.t(), x.flatten(0, -2).t(), None) if need_weight else None
        return grad_x, grad_weight, rows.sum(0) if need_bias else None
