"""The optimizer step: divide, clip, AdamW, learning-rate schedule; and its refusal when a number is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.config.models import Schedule, TrainedModel
from tandem.roles import WriteFiles
from tandem.train.backend import StepReport

TENSORS, COUNTS = "optimizer.safetensors", "optimizer.json"
# Elements summed at one time. torch splits longer sums between threads, and the bits then depend on their number.
SUM_BLOCK = 1 << 14


def learning_rate(schedule: Schedule, lr: float, step: int, total_steps: int) -> float:
    """The rate of step 0, 1, ... of `total_steps`: linear warm-up, then constant, or down to lr * min_lr_ratio."""
    if step < schedule.warmup_steps:
        return lr * (step + 1) / (schedule.warmup_steps + 1)
    left = max(1, total_steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / left)
    floor = schedule.min_lr_ratio
    match schedule.name:
        case "constant":
            return lr
        case "linear":
            return lr * (floor + (1 - floor) * (1 - progress))
        case "cosine":
            return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def sum_of_squares(x: Tensor) -> Tensor:
    """float64 sum of x^2, with the same bits for any number of threads."""
    flat = x.detach().flatten()
    whole = flat.numel() // SUM_BLOCK * SUM_BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, SUM_BLOCK), dim=1, dtype=torch.float64).square()
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()
    total = sum_of_squares(blocks.sqrt()) if blocks.numel() > SUM_BLOCK else blocks.sum()
    return total + rest


class Optimizer:
    """AdamW over named float32 parameters. Norms and biases (one dimension) do not decay."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], config: TrainedModel, total_steps: int) -> None:
        self.parameters = dict(parameters)
        self._config = config
        self._total_steps = total_steps
        self._steps = 0
        self._refusals = 0
        decaying = [p for p in self.parameters.values() if p.dim() > 1]
        plain = [p for p in self.parameters.values() if p.dim() <= 1]
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

        A divisor of 0 says that nothing was in the loss: the gradient is cleared and nothing moves.
        """
        if not (math.isfinite(divisor) and divisor >= 0):
            raise ValueError(f"optim_step wants a finite divisor >= 0, got {divisor}")
        lr = learning_rate(self._config.scheduler, self._config.optimizer.lr, self._steps, self._total_steps)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = math.sqrt(float(sum(sum_of_squares(g) for g in gradients))) if gradients else 0.0
        if not (finite and math.isfinite(norm)):
            self._refusals += 1
            self.clear()
            return StepReport(norm, lr, refused=True, refusals_left=self._refusals_left)
        if divisor == 0 or not gradients:
            self.clear()
            return StepReport(0.0, lr, refusals_left=self._refusals_left)
        norm /= divisor
        limit = self._config.max_grad_norm
        factor = 1.0 if limit is None or norm <= limit else limit / norm
        torch._foreach_mul_(gradients, factor / divisor)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._steps += 1
        self.clear()
        return StepReport(norm, lr, refusals_left=self._refusals_left)

    @property
    def _refusals_left(self) -> int:
        return self._config.max_skipped_optimizer_steps - self._refusals

    def clear(self) -> None:
        """Drop the accumulated gradient."""
        self._adamw.zero_grad(set_to_none=True)

    def snapshot(self, copy: bool) -> WriteFiles:
        """Moments by parameter name, float32 exact; counts as JSON."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        tensors = {
            f"{names[parameter]}/{key}": held(value, copy)
            for parameter, state in self._adamw.state.items()
            for key, value in state.items()
        }
        counts = {"steps": self._steps, "refusals": self._refusals, "total_steps": self._total_steps}

        def write(directory: Path) -> None:
            save_file(tensors, directory / TENSORS)
            (directory / COUNTS).write_text(json.dumps(counts))

        return write

    def load(self, directory: Path) -> None:
        """Continue where the snapshot stood. The schedule's length and the knobs are this run's own."""
        counts = json.loads((directory / COUNTS).read_text())
        self._steps, self._refusals = counts["steps"], counts["refusals"]
        self.clear()
        self._adamw.state.clear()
        for name, value in load_file(directory / TENSORS).items():
            parameter_name, key = name.rsplit("/", 1)
            parameter = self.parameters[parameter_name]
            self._adamw.state[parameter][key] = value.to(parameter.device)


def held(tensor: Tensor, copy: bool) -> Tensor:
    """A tensor for a snapshot, on the CPU; `copy` keeps it from what training does next."""
    there = tensor.detach().to("cpu")
    return there.clone().contiguous() if copy and there.data_ptr() == tensor.data_ptr() else there.contiguous()
