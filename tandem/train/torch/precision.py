"""Half-precision passes over float32 weights: a copy that the passes run on, and sums of gradients in float32.

The copy is cast once an optimizer step. Casting in every pass instead (autocast) reads each weight in float32 again and
again, and keeps the residual stream in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tandem.train.torch.placement import part_of


class WorkingCopies:
    """What the modules hold in the place of their float32 masters. Optimizer, files and exports see the masters."""

    def __init__(self, masters: Mapping[str, nn.Parameter], copies: Mapping[str, nn.Parameter]) -> None:
        """`copies` lie in the modules, under the names of their masters. Without any, the modules hold the masters."""
        self._masters = [part_of(masters[name]) for name in copies]
        self._copies = [part_of(copy) for copy in copies.values()]
        for name, copy in copies.items():
            copy.register_post_accumulate_grad_hook(_add_to(masters[name]))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the masters' numbers. To be called when they have changed."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)


def put_copies(model: nn.Module, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Put copies in `dtype` in the place of the model's parameters, by name; what was there is in the model no more.

    Parameters that are not the model's (a value head) stay, and so do buffers: a rotary frequency needs its digits.
    """
    own = {id(parameter) for parameter in model.parameters()}
    copies = {
        name: nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad)
        for name, p in parameters.items()
        if id(p) in own
    }
    places = {id(parameters[name]): copy for name, copy in copies.items()}
    for module in model.modules():  # every module that holds one, so that tied weights stay tied
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in places:
                setattr(module, name, places[id(parameter)])
    return copies


def _add_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that moves a finished gradient of the copy into the master's, which sums micro-batches in float32."""

    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None, "called when it has come"
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    return add
