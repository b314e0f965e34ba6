"""The layers of a model through torch.compile: one graph, which all layers and packs of all lengths share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.config.models import TrainedModel
from tandem.train.lengths import any_length
from tandem.train.torch.attention import Kernel

MARKED = "_dynamo_weak_dynamic_indices"  # where torch keeps it


def will_compile(config: TrainedModel, device: torch.device, kernel: Kernel) -> bool:
    """What `compile` means here. `auto`: where it pays, on a GPU, unless ranks share the layers."""
    shared = config.parallel.shares_layers
    if config.compile == "auto":
        return device.type == "cuda" and kernel != "sdpa" and not shared
    if config.compile and shared:
        raise ValueError(
            f"compile=true and parallel {config.parallel}: layers that tensor or context ranks share are not compiled; "
            "set compile to auto, or both sizes to 1"
        )
    return config.compile


def compile_layers(model: nn.Module, kernel: Kernel, *, trained: bool, selective: bool) -> None:
    """In place. FSDP's hooks and activation checkpointing stay outside of the graph: they act on the module's call.

    `selective` computes again what is no product or attention, even where that must be written to memory once more.
    """
    backend = compile_selective if selective else "inductor"
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            run = torch.compile(module.forward, fullgraph=kernel != "sdpa", backend=backend)
            module.forward = CompiledLayer(run, trained=trained)


def compile_selective(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """inductor, which keeps the input of a product for the backward pass unless it is told not to."""
    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        return torch._dynamo.lookup_backend("inductor")(graph, list(inputs))


class CompiledLayer:
    """A layer's forward pass, compiled. A pass without a graph runs the kernels of one with a graph.

    A graph that is compiled for inference fuses differently and rounds differently: the first ratio would not be 1. So
    does one that is compiled for a pack's length. All sizes but the tokens are constants: as symbols they make a graph
    slow to compile, and dynamic=True would make one of the head's size too in layers that FSDP manages.
    """

    def __init__(self, run: Callable[..., Tensor], *, trained: bool) -> None:
        self._run = run
        self._trained = trained

    def __call__(self, hidden_1PH: Tensor, **context: Any) -> Tensor:
        if torch.is_grad_enabled() or not self._trained:
            return self._go(hidden_1PH, context)
        with torch.enable_grad():
            after_1PH = self._go(hidden_1PH.detach().requires_grad_(), context)
        return after_1PH.detach()  # and with it goes what the layer kept for a backward pass

    def _go(self, hidden_1PH: Tensor, context: dict[str, Any]) -> Tensor:
        """Through the one graph, which takes a view: FSDP gives one to passes with a graph, and to no others."""
        tokens = hidden_1PH.shape[1]
        hidden_1PH = hidden_1PH.view_as(hidden_1PH)
        let_vary(hidden_1PH, tokens)
        for value in context.values():
            for x in value if isinstance(value, tuple) else (value,):
                if isinstance(x, Tensor) and not hasattr(x, MARKED):  # most are the same for all layers
                    let_vary(x, tokens)
        return self._run(hidden_1PH, **context)


def let_vary(x: Tensor, tokens: int) -> None:
    """Let a graph take any number of tokens in place of these: in the first dimension of that size."""
    for one in (x, x._base):
        if one is not None and tokens in one.shape:
            any_length(one, dimension=one.shape.index(tokens))
