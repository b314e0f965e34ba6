"""float32 matrix products on a CPU through oneDNN, where that is faster than what torch takes by itself.

torch takes MKL, which runs AVX2 code on AMD's processors, whatever they can. Measured on an AMD EPYC with AVX-512, one
thread, products of a pack of 1,664 tokens and 128 x 384 weights: MKL 95 to 105 GFLOP/s, oneDNN 140 to 235. A row's bits
depend on nothing but the row there too: not on the number of rows (two or more), and not on threads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# As activation checkpointing knows them.
PRODUCTS = frozenset({torch.ops.mkldnn._linear_pointwise.default} if torch.backends.mkldnn.is_available() else ())


@cache
def pays() -> bool:
    """Whether this process's CPU is one of those: AMD's with AVX-512."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    about = Path("/proc/cpuinfo")
    return about.is_file() and "AuthenticAMD" in about.read_text()


def use_onednn(model: nn.Module) -> None:
    """Let the linear maps of a model compute there, in place: forward and backward. float32 on a CPU."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = Linear(module)


class Linear:
    """x W^T + b."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, input: Tensor) -> Tensor:  # named as in the forward pass that it stands for
        product = _Product.apply(input, self._module.weight)
        return product if self._module.bias is None else product + self._module.bias


class _Product(torch.autograd.Function):
    """x [..., I], weight [O, I] -> x weight^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times_transposed(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = gradients
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        grad_x = times_transposed(grad, weight.t()) if need_x else None
        grad_weight = times_transposed(grad.flatten(0, -2).t(), x.flatten(0, -2).t()) if need_weight else None
        return grad_x, grad_weight


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., I], weight [O, I] -> x weight^T, without a graph."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
