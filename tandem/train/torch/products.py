"""A trainer's float32 products on a CPU through oneDNN, forward and backward: see `tandem.onednn`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tandem import onednn

# As activation checkpointing knows them.
PRODUCTS = frozenset({torch.ops.mkldnn._linear_pointwise.default} if torch.backends.mkldnn.is_available() else ())


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
        return onednn.linear(x, weight, None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = gradients
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        grad_x = onednn.linear(grad, weight.t(), None) if need_x else None
        grad_weight = onednn.linear(grad.flatten(0, -2).t(), x.flatten(0, -2).t(), None) if need_weight else None
        return grad_x, grad_weight
