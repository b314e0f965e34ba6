"""One pack on several ranks: each runs a slice of its tokens, and attends to the keys and values of all of them.

torch's own context parallelism deals tokens out to balance the load, and knows no borders between sequences of a pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """Rank `index` of `count` that share a pack; `group` has them in this order."""

    index: int
    count: int
    group: dist.ProcessGroup

    def part(self, tokens: int) -> slice:
        """The tokens of a pack that this rank runs. They divide: `Parallel.token_parts` is checked with the recipe."""
        size = tokens // self.count
        return slice(self.index * size, (self.index + 1) * size)

    def gather(self, x_C: Tensor) -> Tensor:
        """The slices of all ranks, one after the other. Gradients that the ranks find for a slice are added up."""
        return _Gather.apply(x_C, self)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks. All must do the same with it: each takes the gradient for its own summand."""
        return _Total.apply(x, self.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_C: Tensor, context: Context) -> Tensor:
        ctx.context = context
        x_P = x_C.new_empty(context.count * x_C.shape[0], *x_C.shape[1:])
        dist.all_gather_into_tensor(x_P, x_C.contiguous(), group=context.group)
        return x_P

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (grad_P,) = gradients
        grad_C = grad_P.new_empty(grad_P.shape[0] // ctx.context.count, *grad_P.shape[1:])
        dist.reduce_scatter_tensor(grad_C, grad_P.contiguous(), group=ctx.context.group)
        return grad_C, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
