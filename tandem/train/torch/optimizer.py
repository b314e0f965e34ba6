"""The optimizer step of the torch backend: AdamW over each rank's parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tandem.config.models import TrainedModel
from tandem.roles import WriteFiles
from tandem.train.backend import StepReport
from tandem.train.files import COUNTS, MOMENTS, SavedTensors, keep
from tandem.train.offload import HostMemory
from tandem.train.optim import StepRule, total_square
from tandem.train.torch.mesh import Mesh
from tandem.train.torch.placement import part_of, region_of, whole_of


class Optimizer:
    """AdamW over named float32 parameters. Norms and biases (one dimension) do not decay.

    On a mesh each rank steps its own parts, which are plain tensors: AdamW looks at one number at a time.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: TrainedModel, total_steps: int, mesh: Mesh
    ) -> None:
        self.parameters = dict(parameters)
        self._mesh = mesh
        self._parts = {name: p if mesh.devices is None else nn.Parameter(part_of(p)) for name, p in parameters.items()}
        self._rule = StepRule(config, total_steps)
        self._away = HostMemory()  # the moments, while they are not on the device
        decaying = [p for p in self._parts.values() if p.dim() > 1]
        plain = [p for p in self._parts.values() if p.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decaying, "weight_decay": config.optimizer.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=True,
        )

    @torch.no_grad()
    def step(self, divisor: float, *, finite: bool) -> StepReport:
        """Divide the gradient, clip it to `max_grad_norm`, step, clear. Refused when it, or a loss, is not finite.

        A divisor of 0 says that nothing was in the loss: the gradient is cleared and nothing moves. On a mesh all ranks
        step or none does, and the norm is that of the whole gradient.
        """
        self._rule.check(divisor)
        self._away.give_back()
        gradients = self._take_gradients()
        report, factor = self._rule.judge(self._norm(gradients, finite), divisor if gradients else 0.0)
        if factor is not None:
            torch._foreach_mul_(list(gradients.values()), factor)
            for group in self._adamw.param_groups:
                group["lr"] = report.lr
            self._adamw.step()
        self.clear()
        return report

    def _take_gradients(self) -> dict[str, Tensor]:
        """The gradient of every part, summed over the ranks."""
        gradients = self._mesh.take_gradients(self.parameters)
        for name, part in self._parts.items():
            part.grad = gradients.get(name)
        return gradients

    def _norm(self, gradients: Mapping[str, Tensor], finite: bool) -> float:
        """Of the whole gradient; NaN on every rank when a loss of one was not finite. A part on k ranks counts 1/k."""
        total = next(iter(self._parts.values())).new_zeros((), dtype=torch.float64)
        if gradients:
            copies = [self._mesh.copies(self.parameters[name]) for name in gradients]
            total += total_square(list(gradients.values()), copies)
        return math.sqrt(float(self._mesh.total(total if finite else total * math.nan)))

    def clear(self) -> None:
        """Drop the accumulated gradient."""
        for parameter in (*self.parameters.values(), *self._parts.values()):
            parameter.grad = None

    def park(self) -> None:
        """The moments leave the device until the next step."""
        self._away.take(value for state in self._adamw.state.values() for value in state.values())

    def snapshot(self, copy: bool) -> WriteFiles:
        """Moments by parameter name, float32 exact; counts as JSON."""
        counts = {COUNTS: json.dumps(self._rule.counts())}
        return keep(self._moments(), MOMENTS, self._mesh.shard, copy=copy, texts=counts)

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        """Whole, one after the other: all ranks take part."""
        for name, part in self._parts.items():
            for key, value in self._adamw.state.get(part, {}).items():
                here = self._away.read(value).to(part.device)
                yield f"{name}/{key}", whole_of(here, self.parameters[name]) if here.dim() else here

    def load(self, directory: Path) -> None:
        """Continue where the snapshot stood. The schedule's length and the knobs are this run's own."""
        self._rule.resume(json.loads((directory / COUNTS).read_text()))
        self.clear()
        self._away = HostMemory()
        self._adamw.state.clear()
        saved = SavedTensors(directory, MOMENTS)
        for name in saved.names():
            parameter_name, key = name.rsplit("/", 1)
            part = self._parts[parameter_name]
            region = None if key == "step" else region_of(self.parameters[parameter_name])
            # a copy: the memory of a file cannot be given back
            self._adamw.state[part][key] = saved.read(name, region).to(part.device, copy=True)
